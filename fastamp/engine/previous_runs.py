"""Move the files of an earlier run in OUTPUT_DIR to OUTPUT_DIR/previous-<n>, so that two runs do not mix."""

import itertools
import logging
import os
import re
from pathlib import Path

from fastamp.utils import comm
from fastamp.utils.errors import writing
from fastamp.utils.logger import move_earlier_log

logger = logging.getLogger(__name__)

# Training writes metrics.json before its first iteration.
_MARKS = ("last_checkpoint", "metrics.json")
_NAMES = re.compile(
    r"last_checkpoint|metrics_eval\.json|config\.yaml|report(_eval)?\.html|evaluation|pictures|amp_crash|tracking"
    r"|events\.out\.tfevents\..*|model_(best|final|interrupted|unevaluated|\d+|iter_\d+|stage\d+)(_stripped)?\.pth"
)


def move_earlier_run(output_dir: Path) -> Path | None:
    """Move the files of an earlier training run to a new folder ``previous-<n>``. Must be called on every rank.

    Moves checkpoints and their stripped copies, metrics, TensorBoard events, the config, reports, evaluation results,
    pictures, crash dumps, data of experiment trackers and the log.
    A log file that ``setup_logger`` has opened is divided: lines of the current run stay. All other files stay too.

    Args:
        output_dir: folder of the run that starts.

    Returns:
        The new folder; None if ``output_dir`` contains no earlier run.

    Raises:
        WriteError: if a file cannot be moved.
    """
    number = 0
    if comm.is_main_process() and any((output_dir / name).exists() for name in _MARKS):
        number = next(n for n in itertools.count(1) if not os.path.lexists(output_dir / f"previous-{n}"))
        with writing(folder := output_dir / f"previous-{number}"):
            folder.mkdir()
            # last_checkpoint first: without it, an interrupted move leaves no reference to a moved file.
            for path in sorted(output_dir.iterdir(), key=lambda path: path.name != "last_checkpoint"):
                if _NAMES.fullmatch(path.name):
                    path.rename(folder / path.name)
    number = int(comm.broadcast_scalar(number))
    if not number:
        return None
    folder = output_dir / f"previous-{number}"
    with writing(folder):
        folder.mkdir(exist_ok=True)  # on another machine, OUTPUT_DIR may be another folder
        move_earlier_log(output_dir, folder, rank=comm.get_rank(), world_size=comm.get_world_size())
        # metrics.json last: after an interrupted move, it marks the rest as an earlier run, which the next run moves.
        metrics = output_dir / "metrics.json"
        if comm.is_main_process() and metrics.exists():
            metrics.rename(folder / metrics.name)
    logger.warning(
        "OUTPUT_DIR %s contained an earlier run: moved its files to %s.\n"
        "  fix: to continue the earlier run instead, set OUTPUT_DIR to %s and add --resume; if its files are not "
        "needed, delete this folder",
        output_dir,
        folder,
        folder,
    )
    return folder
