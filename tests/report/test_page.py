"""HTML report: content, escaping of hostile names and config values, size, write errors."""

import base64
import dataclasses
import hashlib
import re
from html.parser import HTMLParser

import pytest
import torch
from hostile import SCRIPT, hostile_run
from jinja2 import UndefinedError

from fastamp.evaluation import CountMatrix, ImageExample, ReportSection, Table
from fastamp.evaluation.rerank import ReRanking
from fastamp.report import write_report
from fastamp.report.curves import cmc_panel, health_panels, training_panels
from fastamp.report.page import page, templates
from fastamp.report.run import data_counts
from fastamp.utils.errors import ConfigError

MIB = 2**20
VOID = {"meta", "link", "img", "br"}


class Elements(HTMLParser):
    """HTML parser that collects elements and text, and checks that all tags are closed."""

    def __init__(self, text):
        super().__init__()
        self.found, self.open, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, name, attributes):
        self.found.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        self.text += data if "style" not in self.open else ""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return hostile_run(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def text(run):
    return page(run)


@pytest.fixture(scope="module")
def elements(text):
    return Elements(text)


def test_hostile_values_are_escaped_in_the_report(elements):
    names = {name for name, _ in elements.found}
    assert not names & {"script", "iframe", "object", "form", "base", "b"}
    assert SCRIPT in elements.text  # shown as text
    for name, attributes in elements.found:
        assert not any(key.startswith("on") or key == "style" for key in attributes), (name, attributes)
        for key in ("src", "href"):
            assert attributes.get(key, "data:").startswith(("data:image/jpeg;base64,", "data:", "#"))
    assert "\x00" not in elements.text and "\u202e" not in elements.text


def test_content_security_policy_allows_only_embedded_style_and_images(text, elements):
    policy = next(a["content"] for _, a in elements.found if a.get("http-equiv") == "Content-Security-Policy")
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy and "unsafe" not in policy
    assert "http://" not in style and "url(" not in style and "@import" not in style


def test_report_contains_metrics_charts_config_and_images(run, elements):
    for words in (
        "mAP", "Rank-1", "mINP", "24 queries, 60 gallery images", "Cumulative matching", "Verification (ROC)",
        "genuine pairs", "Camera pairs", "Best queries", "Worst queries", "Losses", "Learning rate", "Gradient norm",
        "Loss scale", "Skipped steps", "3 of 12 (25 %)", "DATASETS.TESTS", "OUTPUT_DIR", "PyTorch", "identities",
        "cosine distance", "cannot be read",
    ):  # fmt: skip
        assert words in elements.text, words
    low, high = run.sets[0].metrics["intervals"]["mAP"]
    assert f"{low:.1f} to {high:.1f}" in elements.text
    assert elements.found[0] == ("html", {"lang": "en"})
    pictures = [attributes for name, attributes in elements.found if name == "img"]
    assert len(pictures) > 100 and all(picture["alt"] for picture in pictures)
    assert sum(name == "svg" and attributes.get("role") == "img" for name, attributes in elements.found) >= 10


@pytest.mark.parametrize(
    "protocol",
    [{"rule": "vehicleid", "num_trials": 2}, {"metric": "euclidean"}, {"re_ranking": ReRanking(k1=4, k2=2)},
     {"rule": "cuhk03", "false_accept_rates": (0.1,)}],
)  # fmt: skip
def test_sections_of_the_report_depend_on_the_protocol(tmp_path, protocol):
    text = Elements(page(hostile_run(tmp_path, sets=1, **protocol))).text
    assert ("Verification (ROC)" in text) == ("rule" not in protocol or protocol["rule"] != "vehicleid")
    assert ("TAR" in text or "true accept rate" in text) or protocol.get("rule") == "vehicleid"
    assert ("cosine similarity" in text) == (not {"metric", "re_ranking"} & set(protocol))


def test_report_size_is_bounded_for_many_test_sets(run, tmp_path):
    many = dataclasses.replace(run, sets=list(run.sets[:1]) * 16)
    path = write_report(many, tmp_path / "new" / "folder")
    assert path.stat().st_size < 6 * MIB  # the images are noise, which JPEG compresses poorly


def test_report_renders_without_history_details_and_images(run):
    bare = dataclasses.replace(run.sets[0], result=None, query=[], gallery=[], metrics={"mAP": 1.0, "metric": 2.0})
    text = Elements(page(dataclasses.replace(run, sets=[bare], history=None, train=[]))).text
    assert "1.0 %" in text and "Training" not in text


def test_sections_of_an_evaluator_are_shown_with_tables_matrix_and_images(run):
    section = ReportSection(
        f"Colors {SCRIPT}",
        "note of the section",
        [Table("shares", ("color", "share"), [("red", "25 %"), (SCRIPT, "–")])],
        CountMatrix(
            "Confusion", "rows: labels", "label", ("red", "blue"), ("red", "blue"), torch.tensor([[3, 1], [0, 0]])
        ),
        [ImageExample(0, ("missed red", SCRIPT)), ImageExample(30, ("right",), correct=True)],
        "Errors",
    )
    image_set = dataclasses.replace(run.sets[0], sections=[section])
    bare = dataclasses.replace(image_set, query=[], gallery=[], result=None, metrics={"Acc@1": 12.5, "metric": 12.5})
    elements = Elements(page(dataclasses.replace(run, sets=[image_set, bare])))
    for words in ("note of the section", "shares", "25 %", "Errors (2)", "missed red", "cannot be read", "12.5"):
        assert words in elements.text, words
    assert "Errors (0)" not in elements.text and "script" not in {name for name, _ in elements.found}
    cells = [
        (attributes["title"], attributes.get("class"))
        for name, attributes in elements.found
        if name == "td" and "title" in attributes
    ]
    assert cells.count(("3 of 4", "h7")) == 2 and cells.count(("1 of 4", "h2")) == 2
    assert cells.count(("0 of 0", None)) == 4
    frames = [
        attributes["class"]
        for name, attributes in elements.found
        if name == "div" and "frame" in attributes.get("class", "")
    ]
    assert {"frame wrong", "frame correct"} <= set(frames)


def test_baselines_of_other_metrics_have_a_table_of_their_own(run):
    metrics = {"mAP": 50.0, "Rank-1": 60.0, "mA": 70.0, "metric": 55.0}
    baselines = {"raw pixels": {"mAP": 5.0, "Rank-1": 6.5}, "most frequent values": {"mA": 51.5, "metric": 51.5}}
    image_set = dataclasses.replace(run.sets[0], metrics=metrics | {"baselines": baselines})
    text = Elements(page(dataclasses.replace(run, sets=[image_set]))).text
    for words in ("baseline: raw pixels", "6.5", "baseline: most frequent values", "51.5", "predicted by"):
        assert words in text, words


def test_failed_write_of_the_report_leaves_no_partial_file(run, tmp_path):
    run = dataclasses.replace(run, sets=[])
    (tmp_path / "report.html").mkdir()
    (tmp_path / "report.html" / "in_the_way").touch()
    with pytest.raises(ConfigError, match=r"report.html"):
        write_report(run, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(ConfigError, match="in_the_way"):
        write_report(run, tmp_path / "report.html" / "in_the_way")


def test_report_template_escapes_values_once_and_keeps_markup():
    template = templates().from_string(
        "{% macro p(text) %}<p title='{{ text }}'>{{ text }}</p>{% endmacro %}{{ p(x) }}"
    )
    assert (
        template.render(x="'<&>\x00\ud800")
        == "<p title='&#39;&lt;&amp;&gt;\ufffd\ufffd'>&#39;&lt;&amp;&gt;\ufffd\ufffd</p>"
    )
    with pytest.raises(UndefinedError):  # an undefined value is an error, not an empty string
        template.render()


class Names:
    """Dataset that names identities and cameras."""

    def identity(self, pid):
        return f"name of {pid}"

    def camera(self, camid):
        return f"camera {camid}"


def test_report_shows_the_names_and_files_of_the_dataset(run):
    image_set = dataclasses.replace(run.sets[0], source=Names())
    text = page(dataclasses.replace(run, sets=[image_set]))
    elements = Elements(text)
    worst = image_set.result.examples.lists["worst"][0]
    item = image_set.query[worst.query]
    assert (
        f"identity name of {item.pid}".replace("\x00", "\ufffd").replace("\ud800", "\ufffd").replace("\u202e", "\ufffd")
        in elements.text
    )
    assert item.path in elements.text and "camera 0" in elements.text
    titles = {attributes.get("title") for name, attributes in elements.found if name == "img"}
    assert item.path in titles


def test_report_has_no_camera_matrix_without_names_of_cameras(run, elements):
    assert "Camera pairs" in elements.text
    source = Names()
    source.camera = lambda camid: ""
    sets = [dataclasses.replace(images, source=source) for images in run.sets]
    without = dataclasses.replace(run, sets=sets)
    assert "Camera pairs" not in Elements(page(without)).text
    assert [cameras for *_, split, _, _, cameras in data_counts(without) if split != "train"] == [0] * 2 * len(sets)


def test_report_folds_rank_lists_and_config_and_has_a_color_scale(elements):
    folds = [attributes for name, attributes in elements.found if name == "details"]
    assert len(folds) == 5 and sum("open" in fold for fold in folds) == 2  # of 2 sets: the worst queries
    scale = [a for name, a in elements.found if name == "ol" and "color scale" in (a.get("aria-label") or "")]
    assert len(scale) == 2
    for words in ("Below a baseline", "Above the baselines", "Not distinguishable"):
        if words in elements.text:
            break
    else:
        pytest.fail("no verdict")
    assert "95 % confidence interval" in elements.text and "No previous run" in elements.text


def test_charts_share_their_axes(run):
    panels = [*training_panels(run.history), *health_panels(run.history)]
    assert {panel.bounds()[0] for panel in panels} == {(0.0, 12.0)}
    percent = [panel for panel in panels if panel.y_label == "%"] + [cmc_panel(run.sets[0].result)]
    assert len(percent) > 1 and {panel.bounds()[1] for panel in percent} == {(0.0, 100.0)}
