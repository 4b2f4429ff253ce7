"""Datasets of the person re-identification track of the NAIC challenge 2019 and 2020."""
