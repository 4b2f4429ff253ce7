"""HTML report: content, escaping of hostile names and config values, size, write errors."""

import base64
import dataclasses
import hashlib
import re
from html.parser import HTMLParser

import pytest
from hostile import SCRIPT, hostile_run
from jinja2 import UndefinedError

from fastamp.evaluation.rerank import ReRanking
from fastamp.report import write_report
from fastamp.report.page import page, templates
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
    assert len(pictures) > 100 and all(each["alt"] for each in pictures)
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
