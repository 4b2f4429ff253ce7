"""Pedestrian attributes: labels, head, loss, models and evaluators."""
