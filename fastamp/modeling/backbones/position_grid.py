"""Grid of the patches for which a position embedding in a weights file was learned."""

import math

from fastamp.checkpoint.load_state import WeightsOrigin
from fastamp.config import Key, input_size
from fastamp.utils.errors import WeightsError

KEYS = (
    Key(
        "MODEL.BACKBONE.WEIGHTS_GRID",
        (),
        "Transformers and CLIP: number of rows and columns of patches for which the position embedding in a weights "
        "file was learned, e.g. (18, 8) for images of 288 x 128. () to take it from the config in fastamp's "
        "checkpoints, and to infer it for other files.",
        low=1,
        of=int,
    ),
)

Grid = tuple[int, int]

# Image sizes (height, width), most frequent first.
REID_SIZES = (
    *((256, 128), (384, 128), (256, 256), (224, 224), (288, 128), (384, 192), (256, 192), (320, 160), (320, 128)),
    *((192, 192), (320, 320), (384, 384), (128, 64), (160, 80), (192, 96), (224, 112), (288, 144), (512, 256)),
)
DEFAULT_STRIDE = (16, 16)  # of MODEL.BACKBONE.STRIDE_SIZE
# Pairs of STRIDE_SIZE and LAST_STRIDE, most frequent first: no overlap, TransReID's, the others down to half a patch.
COMMON_STRIDES = tuple(((stride, stride), 1) for stride in (16, 12, 15, 14, 13, 11, 10, 9, 8))
_PERSON_RATIO = 2.0  # height / width of the images in most ReID trainings


class PositionGrid:
    """Base class of backbones with a learned position embedding, which is resized if a file has another grid.

    Attributes:
        grid: rows and columns of the position embedding of the model.
        weights_grid: those of weights files, ``MODEL.BACKBONE.WEIGHTS_GRID``; () if not given.
    """

    grid: Grid
    weights_grid: tuple[int, ...] = ()
    _origin = WeightsOrigin()

    def set_weights_origin(self, origin: WeightsOrigin) -> None:
        """Store what is known about the file whose state dict is converted next."""
        self._origin = origin

    def grid_for(self, size: Grid, stride: Grid, last_stride: int) -> Grid:
        """Compute the grid of a model with this class for training images of ``size`` (height, width).

        Args:
            size: height and width, in pixels.
            stride: ``MODEL.BACKBONE.STRIDE_SIZE``.
            last_stride: ``MODEL.BACKBONE.LAST_STRIDE``.
        """
        raise NotImplementedError

    def common_strides(self) -> tuple[tuple[Grid, int], ...]:
        """List common pairs of ``stride`` and ``last_stride``, most frequent first; see ``grid_for``."""
        return COMMON_STRIDES

    def grid_in_file(self, patches: int, notes: list[str], method: str) -> Grid:
        """Find the grid of a position embedding, and add remarks to ``notes`` if it differs or was inferred.

        The grid is that of the config stored with the weights, else ``weights_grid``, else inferred: files of
        pretraining have a square grid if possible; ReID files that of a common image size and stride. If the number of
        patches of a ReID file is that of the model, the grid of the model is assumed.

        Args:
            patches: number of positions, without those of class, part and register tokens.
            notes: remarks for the import report.
            method: interpolation method, for the remark.

        Raises:
            WeightsError: if ``weights_grid`` has another number of positions.
        """
        grid, others = self._stored_grid(patches), []
        if grid is None and self.weights_grid:
            grid = self._given_grid(patches)
        if grid is None:
            grid, *others = self._inferred_grids(patches)
        if grid != self.grid:
            notes.append(
                f"the position embedding was resized from {_text(grid)} to {_text(self.grid)} patches by {method} "
                "interpolation (see INPUT.SIZE_TRAIN or CROP.SIZE, MODEL.BACKBONE.STRIDE_SIZE)"
            )
        if others:
            notes.append(
                f"the file does not state the grid of its {patches} positions: {_text(grid)} is assumed, but "
                f"{' and '.join(map(_text, others))} would fit too; set MODEL.BACKBONE.WEIGHTS_GRID if it is another"
            )
        return grid

    def _stored_grid(self, patches: int) -> Grid | None:
        """Compute the grid from the config stored with the weights; None without one that fits."""
        config = self._origin.config
        try:
            size, backbone = input_size(config, is_train=True), config.MODEL.BACKBONE
            assert size is not None
            grid = self.grid_for(size, tuple(backbone.STRIDE_SIZE), backbone.LAST_STRIDE)
        except (AttributeError, KeyError, TypeError, ValueError, AssertionError, ZeroDivisionError):
            return None  # no config, or that of another program or network
        return grid if math.prod(grid) == patches else None

    def _given_grid(self, patches: int) -> Grid:
        if len(self.weights_grid) != 2 or math.prod(self.weights_grid) != patches:
            raise WeightsError(
                f"MODEL.BACKBONE.WEIGHTS_GRID is {self.weights_grid}, but the position embedding in the weights file "
                f"has {patches} positions.\n"
                f"  fix: set MODEL.BACKBONE.WEIGHTS_GRID to the rows and columns of the file, e.g. "
                f"{self._inferred_grids(patches)[0]}, or to () to infer them"
            )
        return self.weights_grid[0], self.weights_grid[1]

    def _inferred_grids(self, patches: int) -> list[Grid]:
        """List the grids that fit, most probable first; at least one."""
        return infer_grids(
            patches,
            stride_grid=self.grid,
            common=[self.grid_for(size, *strides) for strides in self.common_strides() for size in REID_SIZES],
            is_reid=self._origin.is_reid,
        )


def infer_grids(patches: int, *, stride_grid: Grid, common: list[Grid], is_reid: bool) -> list[Grid]:
    """List the patch grids (rows, columns) that fit a number of patches, most probable first; at least one.

    Args:
        patches: number of patches.
        stride_grid: grid of the model. If it fits, it is the most probable one; for a file that is not of a ReID model
            and fits a square grid, it is the least probable one.
        common: grids of common ReID trainings, most frequent first.
        is_reid: the file is that of a ReID model. Otherwise, a square grid is preferred, as for ImageNet.
    """
    side = math.isqrt(patches)
    square = [(side, side)] if side * side == patches else []
    same = [stride_grid] if math.prod(stride_grid) == patches else []
    fitting = [grid for grid in common if math.prod(grid) == patches]
    grids = [*same, *fitting, *square] if is_reid or not square else [*square, *fitting, *same]
    return list(dict.fromkeys(grids)) or [factors_like(patches, _PERSON_RATIO)]


def factors_like(patches: int, ratio: float) -> Grid:
    """Return the ``(rows, columns)`` with ``patches`` cells whose ratio rows / columns is nearest to ``ratio``.

    If a tall and a wide grid are equally near, e.g. 16 x 8 and 8 x 16 for a ratio of 1, the tall one is returned.
    """
    divisors = (number for number in range(patches, 0, -1) if patches % number == 0)
    rows = min(divisors, key=lambda number: round(abs(math.log(number * number / patches / ratio)), 9))
    return rows, patches // rows


def _text(grid: Grid) -> str:
    return f"{grid[0]} x {grid[1]}"
