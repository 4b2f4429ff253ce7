"""Calibration of a trained model for open-set decisions, and its entry in the checkpoint."""

import logging
import os
from pathlib import Path
from typing import Any

from fastamp.checkpoint.checkpointer import STRIPPED
from fastamp.checkpoint.entries import no_config_error
from fastamp.checkpoint.weights_file import check_output, read_checkpoint, write_checkpoint
from fastamp.data import build_reid_test_loader
from fastamp.data.datasets.base import ImageDataset
from fastamp.data.datasets.items import PackedItems
from fastamp.diagnostics.nan_locator import describe_evaluation
from fastamp.evaluation import Identities, ReidEvaluator
from fastamp.evaluation.calibration import Calibration
from fastamp.evaluation.protocol import check_columns
from fastamp.evaluation.thresholds import CalibrationOptions, calibrate
from fastamp.feature_pass import feature_pass
from fastamp.inference.predictor import Predictor
from fastamp.utils.errors import ConfigError, DataError
from fastamp.utils.files import expand

logger = logging.getLogger(__name__)


def calibrate_model(predictor: Predictor, data: str, **options: Any) -> Calibration:
    """Calibrate a model on the test images of a dataset.

    Images of identities without a query, such as distractors, are not used. If fastamp draws the test identities of the
    dataset, a warning states their number.

    Args:
        predictor: trained model.
        data: dataset name as in DATASETS.TESTS, e.g. ``Market1501`` or ``csv:FILE``.
        options: see ``CalibrationOptions``.

    Returns:
        The calibration.

    Raises:
        ConfigError: if an option is invalid.
        DataError: if the dataset is missing, its identities were used for training, or it has too few identities.
    """
    calibration_options = CalibrationOptions(**options)
    unused = {"TEST.BASELINES": False, "TEST.PER_QUERY": False, "TEST.REPORT": False, "TEST.GROUP_BY": ""}
    cfg = predictor.cfg.with_values(unused)
    loader, num_query = build_reid_test_loader(cfg, data)
    dataset = loader.dataset
    if data in cfg.DATASETS.NAMES:
        _check_not_trained(dataset.sources[0], data)
    if len(dataset.sources[0].train) and (note := dataset.sources[0].split_note):
        logger.warning(
            "%s: only the test identities are used; %s\n"
            "  fix: if the model was not trained on this dataset, set DATASETS.FOLDER.TEST_FRACTION to 1 to use all "
            "identities%s",
            *(data, note, ", or add a column split" if data.startswith("csv:") else ""),
        )
    evaluator = ReidEvaluator(cfg, num_query)
    evaluator.set_column_names(dataset.column_names())
    protocol = evaluator.protocol
    # Checked before the features are extracted, which takes long.
    columns = dataset.rankable_columns()
    labels = Identities.split(num_query, dataset.labels, dataset.camids, columns, dataset.column_names())
    check_columns(columns, protocol)
    calibration_options.split(dataset.labels[protocol.rule.images_with_query(labels).numpy()], data)
    settings: dict[str, Any] = {"flip_test": cfg.TEST.FLIP.ENABLED, "title": "extracting features"}
    feature_pass(predictor.model, loader, evaluator.process, predictor.policy, locate=describe_evaluation, **settings)
    features, identities, _ = evaluator.gather()
    used = protocol.rule.images_with_query(identities)
    return calibrate(
        features[used],
        identities.all_images().select(used, used),
        metric=protocol.metric,
        junk=protocol.rule.junk,
        source=data,
        config_hash=predictor.config_hash,
        **options,
    )


def write_calibrated(
    checkpoint: str | os.PathLike[str],
    calibration: Calibration,
    out: str | os.PathLike[str] | None = None,
    *,
    in_place: bool = False,
) -> Path:
    """Write a copy of a checkpoint that contains a calibration.

    Args:
        checkpoint: checkpoint of the calibrated model.
        calibration: calibration of this model.
        out: output file, ``.pth``, which must not exist. Default: ``<checkpoint>_calibrated.pth`` in the same folder.
        in_place: if True, write to the checkpoint itself. Default: False.

    Returns:
        The path of the written file.

    Raises:
        WeightsError: if the checkpoint cannot be read, or contains no config.
        ConfigError: if the output file exists, has another suffix, or cannot be written.
    """
    source = expand(checkpoint)
    target = check_calibrated_output(source, out, in_place=in_place)
    content = read_checkpoint(source)
    if not isinstance(content, dict) or not isinstance(content.get("config"), str):
        raise no_config_error(source)
    if source.suffix != ".pth":
        content.setdefault(STRIPPED, "model")
    if "calibration" in content:
        logger.warning("the new calibration replaces that of %s", source)
    write_checkpoint(target, content | {"calibration": calibration.state_dict()})
    return target


def check_calibrated_output(source: Path, out: str | os.PathLike[str] | None, *, in_place: bool) -> Path:
    """Return the path of the output file of ``write_calibrated``.

    Raises:
        ConfigError: if the file exists, or has another suffix than ``.pth``.
    """
    if in_place and out is not None:
        raise ConfigError("got both --in-place and --output.\n  fix: remove one of them")
    target = source.with_name(f"{source.stem}_calibrated.pth") if out is None else expand(out)
    target = source if in_place else target
    check_output(target, source, in_place=in_place)
    if not in_place and target.exists():
        raise ConfigError(
            f"the output file {target} already exists.\n  fix: choose another --output, or delete this file"
        )
    return target


def _check_not_trained(dataset: ImageDataset, name: str) -> None:
    """Raise DataError if test identities of a training set are also training identities."""
    trained, tested = (
        {dataset.identity(pid) for pid in PackedItems.of(split).pids.unique()[0]}
        for split in (dataset.train, dataset.query)
    )
    if shared := trained & tested:
        raise DataError(
            f"{len(shared)} of {len(tested)} test identities of {name} were used for training, so the error rates "
            f"would not hold for other identities: {', '.join(sorted(shared)[:5])}\n"
            "  fix: choose a dataset with other identities, or find the shared ones with `fastamp check-data`"
        )
