"""Deprecated names of modules, functions, arguments and attributes still work."""

import importlib
import sys
import warnings
from dataclasses import dataclass

import pytest
import torch

from fastamp.checkpoint.load_state import convert_state_dict
from fastamp.config import get_cfg
from fastamp.evaluation import Identities, Protocol, ReidEvaluator, rank_features
from fastamp.evaluation.pairs import PairScores
from fastamp.evaluation.protocol import SAME_CAMERA, Ranker
from fastamp.evaluation.query_expansion import QueryExpansion
from fastamp.evaluation.rerank import ReRanking
from fastamp.layers.distance import FeatureDistances
from fastamp.modeling.heads import EmbeddingHead
from fastamp.report import EvaluatedSet
from fastamp.utils import moved


@pytest.mark.parametrize("old", sorted(moved.MODULES))
def test_importing_an_old_module_name_returns_the_current_module(old, monkeypatch):
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=moved.MODULES[old]):
        module = importlib.import_module(old)
    assert module is importlib.import_module(moved.MODULES[old])
    assert module.__spec__.name == moved.MODULES[old]
    assert importlib.import_module(old) is module


def test_submodule_can_be_imported_from_the_old_package_name(monkeypatch):
    monkeypatch.delitem(sys.modules, "fastamp.data.demo", raising=False)
    monkeypatch.delitem(sys.modules, "fastamp.data.demo.generate", raising=False)
    with pytest.warns(DeprecationWarning):
        from fastamp.data.demo.generate import generate_demo
    assert generate_demo is importlib.import_module("fastamp.demo.generate").generate_demo


def test_importing_a_renamed_class_emits_a_deprecation_warning():
    with pytest.warns(DeprecationWarning, match="PrecisionDiagnostics"):
        from fastamp.amp import Precautions
    assert Precautions.__module__ == "fastamp.diagnostics.precision_diagnostics"


@pytest.mark.parametrize(
    "old, new",
    [
        ("fastamp.amp.health.FirstSteps", "fastamp.amp.checks.ParameterUpdateMonitor"),
        ("fastamp.amp.refusal.Refusals", "fastamp.amp.device_errors.DeviceErrorHandler"),
        ("fastamp.amp.locate.Location", "fastamp.diagnostics.nan_location.NonFiniteLocation"),
        ("fastamp.amp.crash.crash_of", "fastamp.diagnostics.crash.build_crash_dump"),
        ("fastamp.diagnostics.ten_steps.ten_steps", "fastamp.diagnostics.smoke_train.smoke_train"),
        ("fastamp.diagnostics.rehearsal.Rehearsal", "fastamp.diagnostics.isolated_passes.IsolatedPasses"),
        ("fastamp.engine.diagnosis.Examination", "fastamp.diagnostics.doctor_report.PrecisionReport"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_old_amp_and_diagnostics_names_refer_to_the_renamed_objects(old, new):
    (before, old_name), (module, new_name) = (each.rsplit(".", 1) for each in (old, new))
    found = getattr(importlib.import_module(before), old_name)
    assert found is getattr(importlib.import_module(module), new_name)


@pytest.mark.parametrize(
    "old, module, new",
    [
        ("fastamp.evaluation.Judgement", "fastamp.evaluation.metrics", "EvaluationResult"),
        ("fastamp.evaluation.judge_features", "fastamp.evaluation.metrics", "compute_metrics"),
        ("fastamp.evaluation.Details", "fastamp.evaluation.retrieval_examples", "RetrievalExamples"),
        ("fastamp.evaluation.Wanted", "fastamp.evaluation.retrieval_examples", "ReportOptions"),
        ("fastamp.evaluation.details.Details", "fastamp.evaluation.retrieval_examples", "RetrievalExamples"),
        ("fastamp.evaluation.floors.colour_histogram", "fastamp.evaluation.baselines", "color_histogram"),
        ("fastamp.evaluation.neighbours.nearest_neighbours", "fastamp.evaluation.neighbors", "nearest_neighbors"),
        ("fastamp.evaluation.protocol.Rule", "fastamp.evaluation.protocol", "RankingRule"),
        ("fastamp.evaluation.judge.judge_features", "fastamp.evaluation.metrics", "compute_metrics"),
        ("fastamp.evaluation.matches.check_sets", "fastamp.evaluation.metrics", "check_features"),
        ("fastamp.evaluation.rank.Ranker", "fastamp.evaluation.protocol", "Ranker"),
        ("fastamp.evaluation.rank.rank_distances", "fastamp.evaluation.metrics", "rank_distances"),
        ("fastamp.evaluation.rank.rank_features", "fastamp.evaluation.metrics", "rank_features"),
        ("fastamp.evaluation.roc.accept_rate_name", "fastamp.evaluation.protocol", "accept_rate_name"),
        ("fastamp.evaluation.single_shot.OneGalleryImageRanker", "fastamp.evaluation.single_shot", "VehicleIDRanker"),
    ],
)
def test_old_evaluation_names_refer_to_the_renamed_objects(old, module, new):
    where, _, name = old.rpartition(".")
    with pytest.warns(DeprecationWarning, match=f"{module}.{new}"):
        found = getattr(importlib.import_module(where), name)
    assert found is getattr(importlib.import_module(module), new)


@pytest.mark.parametrize(
    "old, new",
    [
        ("fastamp.checkpoint.load_state.adopt", "fastamp.checkpoint.load_state.convert_state_dict"),
        ("fastamp.modeling.recognize.recognize", "fastamp.modeling.infer_config.infer_config"),
        ("fastamp.modeling.memory.building_model", "fastamp.modeling.out_of_memory.explain_out_of_memory"),
        ("fastamp.modeling.backbones.names.rename_modules", "fastamp.checkpoint.state_dict_conversion.rename_modules"),
        (
            "fastamp.modeling.backbones.options.warn_of_ignored_keys",
            "fastamp.modeling.backbones.build_utils.warn_ignored_options",
        ),
        ("fastamp.modeling.backbones.osnet.halve", "fastamp.modeling.backbones.osnet.transition"),
        ("fastamp.modeling.backbones.osnet.torchreids", "fastamp.modeling.backbones.osnet.torchreid_weights"),
        ("fastamp.modeling.backbones.regnet.stages_of", "fastamp.modeling.backbones.regnet.compute_stages"),
        ("fastamp.modeling.backbones.vit.grid_of", "fastamp.modeling.backbones.vit.infer_grid"),
        ("fastamp.modeling.backbones.vit.keys_of_state", "fastamp.modeling.backbones.vit.infer_embedding_keys"),
        ("fastamp.modeling.heads.jpm_head.shuffled", "fastamp.modeling.heads.jpm_head.shuffle_patches"),
        ("fastamp.modeling.heads.jpm_head.blocks_in_head", "fastamp.modeling.heads.jpm_head.last_block_state"),
        ("fastamp.modeling.meta_arch.mgn.backbone_of", "fastamp.modeling.meta_arch.mgn.backbone_state"),
    ],
)
def test_old_modeling_names_refer_to_the_renamed_objects(old, new, monkeypatch):
    module, _, name = old.rpartition(".")
    if module in moved.MODULES:
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.warns(DeprecationWarning):
        found = getattr(importlib.import_module(module), name)
    module, _, name = new.rpartition(".")
    assert found is getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("calls_super", [True, False])
def test_deprecated_adopt_state_of_a_custom_head_is_still_called(calls_super):
    class Head(EmbeddingHead):
        def adopt_state(self, state, notes):
            notes.append("custom")
            return super().adopt_state(state, notes) if calls_super else state

    state = {"classifier.weight": torch.ones(3, 8)}
    with pytest.warns(DeprecationWarning, match="Head.adopt_state .*convert_state_dict"):
        converted, notes = convert_state_dict(Head(feat_dim=8, num_classes=3), state)
    assert [*converted] == ["weight" if calls_super else "classifier.weight"] and notes == ["custom"]


def test_convert_state_dict_takes_precedence_over_adopt_state(recwarn):
    class Head(EmbeddingHead):
        def convert_state_dict(self, state, notes):
            return super().convert_state_dict(state, notes)

        def adopt_state(self, state, notes):
            raise AssertionError

    assert [*convert_state_dict(Head(feat_dim=8, num_classes=3), {"classifier.weight": torch.ones(3, 8)})[0]] == [
        "weight"
    ]
    assert not recwarn.list


@pytest.mark.parametrize("name", ["read_config", "load_parts", "merge_from_checkpoint", "merge_if_config"])
def test_functions_moved_from_engine_setup_can_still_be_accessed_there(name):
    from fastamp.engine import setup

    with pytest.warns(DeprecationWarning, match=name):
        assert getattr(setup, name).__module__ in ("fastamp.config.read", "fastamp.checkpoint.entries")


def test_importing_an_unknown_module_or_attribute_raises():
    with pytest.raises(ImportError):
        importlib.import_module("fastamp.amp.crashes")
    with pytest.raises(AttributeError):
        moved.moved_names("fastamp.amp", {})("Unknown")


@moved.renamed_arguments(size="length", cross=("junk", lambda value: "own" if value else None))
def described(start, *, length=1, junk=None):
    """Docstring of the function."""
    return start, length, junk


@moved.renamed_arguments(judgement="result")
@dataclass(frozen=True)
class Evaluated:
    """Docstring of the class."""

    name: str
    result: int
    judgement = moved.renamed_attribute("judgement", "result")


class Holder:
    result = None
    judgement = moved.renamed_attribute("judgement", "result")


def test_old_argument_names_emit_a_warning_and_convert_values():
    with pytest.warns(DeprecationWarning, match=r"'size' of described\(\) .*'length'"):
        assert described(0, size=2) == (0, 2, None)
    with pytest.warns(DeprecationWarning, match="'cross'.*'junk'"):
        assert described(start=0, cross=True) == (0, 1, "own")
    with pytest.warns(DeprecationWarning):
        assert described(0, cross=False, length=3) == (0, 3, None)
    assert described.__doc__ == "Docstring of the function."


def test_renamed_arguments_do_not_warn_for_current_names():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert described(0, length=2, junk="own") == (0, 2, "own")
        assert Evaluated("a", 1).result == Evaluated("a", result=1).result == 1


def test_passing_an_argument_under_old_and_new_name_raises():
    with pytest.raises(TypeError, match="'length'.*'size'"):
        described(0, length=1, size=2)
    with pytest.raises(TypeError, match="unknown"):
        described(0, unknown=1)


def test_dataclass_with_renamed_field_accepts_its_old_name():
    with pytest.warns(DeprecationWarning, match="'judgement'.*'result'"):
        each = Evaluated("a", judgement=1)
    assert each == Evaluated("a", 1)
    with pytest.warns(DeprecationWarning, match="Evaluated.judgement .*Evaluated.result"):
        assert each.judgement == 1


def test_renamed_attribute_can_be_assigned_by_its_old_name():
    holder = Holder()
    with pytest.warns(DeprecationWarning):
        holder.judgement = 3
    assert holder.result == 3


def test_evaluation_accepts_old_argument_names():
    pids, camids = torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 0])
    identities = Identities(pids[:2], pids, camids[:2], camids)
    features = torch.eye(4)
    with pytest.warns(DeprecationWarning, match="identities"):
        assert Ranker(ids=identities).matches.junk is SAME_CAMERA
    with pytest.warns(DeprecationWarning, match="junk"):
        assert Ranker(identities, cross_camera=False).matches.junk is None
    with pytest.warns(DeprecationWarning, match="query_features|gallery_features"):
        assert FeatureDistances(queries=features[:2], gallery=features, metric="cosine").shape == (2, 4)
    with pytest.warns(DeprecationWarning, match="identities"):
        assert rank_features(features[:2], features, ids=identities).num_valid == 1
    with pytest.warns(DeprecationWarning, match="judgement"):
        each = EvaluatedSet(name="Demo", metrics={}, judgement=None, query=[], gallery=[])
    with pytest.warns(DeprecationWarning, match="EvaluatedSet.judgement"):
        assert each.judgement is each.result
    evaluator = ReidEvaluator(get_cfg(), 2)
    with pytest.warns(DeprecationWarning, match="ReidEvaluator.judgement"):
        evaluator.judgement = "result"
    assert evaluator.result == "result"
    with pytest.warns(DeprecationWarning, match="ReidEvaluator.floors"):
        assert evaluator.floors is evaluator.baselines
    with pytest.warns(DeprecationWarning, match="'repeats'.*'num_trials'"):
        protocol = Protocol(rule="vehicleid", repeats=3)
    with pytest.warns(DeprecationWarning, match="Protocol.draws_queries"):
        assert protocol.draws_queries and protocol.num_trials == 3
    with pytest.warns(DeprecationWarning, match="'form'.*'variant'"):
        assert ReRanking(form="fastreid") == ReRanking(variant="fastreid")
    with pytest.warns(DeprecationWarning, match="'sides'.*'target'"):
        assert QueryExpansion(sides="query") == QueryExpansion(target="query")
    with pytest.warns(DeprecationWarning, match="percentile_of"):
        assert PairScores("cosine", torch.zeros(2), torch.zeros(2), 2, 2).less_alike
