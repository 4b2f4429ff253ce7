"""Tests of the results table in the log."""

from fastamp.evaluation import print_results

METRICS = {"Rank-1": 80.0, "Rank-5": 90.0, "mAP": 70.5, "mINP": 30.0, "metric": 75.25, "TAR@FAR=0.01": 50.0}
METRICS |= {"num_query": 4, "num_gallery": 20, "num_query_without_match": 1}


def columns(caplog, results, **options):
    caplog.clear()
    print_results(results, protocol="as tested", **options)
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


def test_results_table_names_the_training_sets_and_has_the_mean_over_other_domains(caplog):
    results = {"A": METRICS, "B": {**METRICS, "mAP": 20.0}, "C": {**METRICS, "mAP": 31.0}}
    _, text = columns(caplog, results, trained_on=("A", "D"))
    assert "as tested; trained on A, D" in text
    (row,) = (line for line in text.splitlines() if "mean of 2 other datasets" in line)
    assert [value.strip() for value in row.strip("|").split("|")[1:]][:3] == ["80.00", "90.00", "25.50"]
    assert "mean of 3" not in text
    for names, trained_on in (("AB", ("A",)), ("A", ("A",)), ("ABC", ())):
        _, text = columns(caplog, {name: results[name] for name in names}, trained_on=trained_on)
        assert "mean of" not in text and ("trained on A" in text) == (names == "AB")
    partial = {name: METRICS[name] for name in ("Rank-1", "num_query", "num_gallery", "num_query_without_match")}
    _, text = columns(caplog, {"B": METRICS, "C": partial}, trained_on=("A",))
    (row,) = (line for line in text.splitlines() if "mean of 2 other datasets" in line)
    assert [value.strip() for value in row.strip("|").split("|")[1:]][:3] == ["80.00", "", ""]
