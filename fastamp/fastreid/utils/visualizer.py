"""FastReID's ``Visualizer``: rank lists, ROC curve and score distribution from a distance matrix."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastamp.data.datasets.items import ImageItem
from fastamp.evaluation.protocol import Protocol
from fastamp.evaluation.retrieval_examples import RankList
from fastamp.report.figures import new_figure, rank_list_figure, write_figure
from fastamp.utils.errors import DataError, check_choice, writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Visualizer:
    """Draw retrieval results.

    ``fastamp visualize`` and ``TEST.REPORT`` draw the same for a checkpoint or a run.

    Args:
        dataset: test set with query images before gallery images: ``test_loader.dataset``.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def get_model_output(
        self,
        all_ap: np.ndarray,
        dist: np.ndarray,
        q_pids: np.ndarray,
        g_pids: np.ndarray,
        q_camids: np.ndarray,
        g_camids: np.ndarray,
    ) -> None:
        """Set the results to draw.

        Args:
            all_ap: average precision in 0..1 of each query that has a match, see ``evaluate_rank``.
            dist: (Q, G) distances, 1 - cosine similarity.
            q_pids, g_pids: (Q,) and (G,) identities.
            q_camids, g_camids: (Q,) and (G,) cameras.

        Raises:
            DataError: if the number of average precisions differs from the number of queries with a match.
        """
        self.dist, self.q_pids, self.g_pids = np.asarray(dist), np.asarray(q_pids), np.asarray(g_pids)
        self.q_camids, self.g_camids = np.asarray(q_camids), np.asarray(g_camids)
        self.num_query = len(self.q_pids)
        same = self.q_pids[:, None] == self.g_pids
        self.junk = same & (self.q_camids[:, None] == self.g_camids)
        self.matches = same & ~self.junk
        valid = np.flatnonzero(self.matches.any(1))
        if len(all_ap) not in (len(valid), self.num_query):
            raise DataError(
                f"all_ap: expected {len(valid)} values, one for each query with a match, got {len(all_ap)}.\n"
                "  fix: pass the second return value of evaluate_rank"
            )
        self.queries = valid
        self.all_ap = np.asarray(all_ap)[valid] if len(all_ap) == self.num_query else np.asarray(all_ap)

    def vis_rank_list(
        self,
        output: str,
        vis_label: bool = False,
        num_vis: int = 100,
        rank_sort: str = "ascending",
        label_sort: str = "ascending",
        max_rank: int = 5,
        actmap: bool = False,
    ) -> np.ndarray:
        """Draw the nearest gallery images of queries, one JPEG file per query.

        Args:
            output: folder for the files ``0.jpg``, ``1.jpg``, ...
            vis_label: add a row with the matches of the query. Default False.
            num_vis: number of queries. Default 100.
            rank_sort: order of the queries by average precision: ``"ascending"`` (default) or ``"descending"``.
            label_sort: order of the matches by similarity: ``"ascending"`` (default) or ``"descending"``.
            max_rank: number of gallery images per row. Default 5.
            actmap: not supported; ``fastamp visualize`` draws similarity maps. Default False.

        Returns:
            (N,) indices of the queries that were drawn.

        Raises:
            ConfigError: if an order is unknown, or matplotlib is not installed.
        """
        for name, value in (("rank_sort", rank_sort), ("label_sort", label_sort)):
            check_choice(name, value, ("ascending", "descending"))
        order = np.argsort(self.all_ap, kind="stable")
        order = (order if rank_sort == "ascending" else order[::-1])[: int(num_vis)]
        items = [ImageItem(*item) for item in getattr(self.dataset, "items", None) or self.dataset.img_items]
        queries, gallery = items[: self.num_query], items[self.num_query :]
        folder = Path(output)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        for number, position in enumerate(order):
            query = int(self.queries[position])
            nearest = np.argsort(self.dist[query], kind="stable")
            nearest = nearest[~self.junk[query, nearest]]
            rows = [nearest[: int(max_rank)]]
            if vis_label:
                matches = nearest[self.matches[query, nearest]]
                rows.append((matches[::-1] if label_sort == "ascending" else matches)[: int(max_rank)])
            lists = [self._rank_list(query, self.all_ap[position], row, nearest) for row in rows]
            write_figure(rank_list_figure(lists, queries, gallery, Protocol()), folder / f"{number}.jpg")
        return self.queries[order]

    def _rank_list(self, query: int, ap: float, gallery: np.ndarray, nearest: np.ndarray) -> RankList:
        return RankList(
            query=query,
            ap=float(ap),
            gallery=gallery,
            distances=self.dist[query, gallery],
            matches=self.matches[query, gallery],
            first_match=1 + int(np.argmax(self.matches[query, nearest])),
        )

    def vis_roc_curve(self, output: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Draw the ROC curve to ``roc.jpg`` and the score distribution to ``pos_neg_dist.jpg`` in ``output``.

        Returns:
            ``(fpr, tpr, pos, neg)``: false and true accept rates in 0..1 at descending thresholds, and the similarities
            of genuine and impostor pairs. Junk is excluded. FastReID's curve has inverted labels.
        """
        scores = 1 - self.dist
        pos, neg = scores[self.matches], scores[~self.matches & ~self.junk]
        values = np.concatenate([pos, neg])
        order = np.argsort(-values, kind="stable")
        genuine = np.arange(len(values))[order] < len(pos)
        last = np.flatnonzero(np.append(np.diff(values[order]) != 0, True))
        fpr = np.concatenate([[0.0], np.cumsum(~genuine)[last] / max(1, len(neg))])
        tpr = np.concatenate([[0.0], np.cumsum(genuine)[last] / max(1, len(pos))])
        folder = Path(output)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_figure(self.plot_roc_curve(fpr, tpr), folder / "roc.jpg")
        write_figure(self.plot_distribution(pos, neg), folder / "pos_neg_dist.jpg")
        return fpr, tpr, pos, neg

    @staticmethod
    def save_roc_info(output: str, fpr: np.ndarray, tpr: np.ndarray, pos: np.ndarray, neg: np.ndarray) -> None:
        """Save the result of ``vis_roc_curve`` to ``roc_info.npz`` in ``output``."""
        path = Path(output) / "roc_info.npz"
        with writing(path):
            np.savez_compressed(path, fpr=fpr, tpr=tpr, pos=pos, neg=neg)

    @staticmethod
    def load_roc_info(path: str) -> dict[str, np.ndarray]:
        """Load ``roc_info.npz``: name -> array."""
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)

    @staticmethod
    def plot_roc_curve(
        fpr: Sequence[float], tpr: Sequence[float], name: str = "model", fig: "Figure | None" = None
    ) -> "Figure":
        """Draw a ROC curve; with ``fig``, add it to this figure."""
        figure, axes = _figure_and_axes(fig)
        axes.plot(fpr, tpr, label=name)
        axes.set(xlabel="false accept rate", ylabel="true accept rate", xlim=(0, 1), ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend()
        return figure

    @staticmethod
    def plot_distribution(
        pos: Sequence[float], neg: Sequence[float], name: str = "model", fig: "Figure | None" = None
    ) -> "Figure":
        """Draw the histograms of the similarities of genuine and impostor pairs; with ``fig``, add them to it."""
        figure, axes = _figure_and_axes(fig)
        for values, kind in ((pos, "genuine pairs"), (neg, "impostor pairs")):
            axes.hist(values, bins=80, density=True, alpha=0.5, label=f"{kind}, {name}")
        axes.set(xlabel="cosine similarity", ylabel="density")
        axes.legend()
        return figure


def _figure_and_axes(figure: "Figure | None") -> "tuple[Figure, Axes]":
    """Return ``figure``, or a new figure if it is None, and its axes."""
    figure = figure or new_figure(6, 5)
    return figure, figure.axes[0] if figure.axes else figure.subplots()
