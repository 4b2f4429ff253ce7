"""Tests of the results table in the log."""

import logging

from fastamp.evaluation import print_results

METRICS = {"Rank-1": 80.0, "Rank-5": 90.0, "mAP": 70.5, "mINP": 30.0, "metric": 75.25, "TAR@FAR=0.01": 50.0}
METRICS |= {"num_query": 4, "num_gallery": 20, "num_query_without_match": 1}


def columns(caplog, results):
    caplog.clear()
    with caplog.at_level(logging.INFO):
        print_results(results, protocol="as tested")
    header = caplog.text.splitlines()[1]
    return [name.strip() for name in header.strip("|").split("|")][1:], caplog.text


def test_results_table_columns_are_in_order_of_metrics(caplog):
    names, text = columns(caplog, {"Demo": METRICS})
    assert names == ["Rank-1", "Rank-5", "mAP", "mINP", "metric", "TAR@FAR=0.01"]
    assert "70.50" in text and "4 queries, 20 gallery images, 1 queries without a match" in text


def test_results_table_shows_float_metrics_of_custom_evaluator(caplog):
    names, text = columns(caplog, {"Mine": {"accuracy": 12.5, "loss": 0.25, "count": 3}})
    assert names == ["accuracy", "loss"] and "12.50" in text and "queries" not in text


def test_results_table_combines_columns_of_custom_and_default_evaluators(caplog):
    names, _ = columns(caplog, {"Demo": METRICS, "Mine": {"accuracy": 12.5}})
    assert names == ["Rank-1", "Rank-5", "mAP", "mINP", "metric", "TAR@FAR=0.01", "accuracy"]
