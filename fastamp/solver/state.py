"""Optimizer state in checkpoints. A resumed run restores the state, but takes the options from the config."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fastamp.checkpoint.load_state import examples
from fastamp.checkpoint.shards import gather_rows, select_rows
from fastamp.solver.state_layout import check_state
from fastamp.utils.plural import plural
from fastamp.utils.sharding import RowShard, row_shards

logger = logging.getLogger(__name__)

# Options that change the entries of the state.
_STRUCTURAL = ("amsgrad", "centered")
_NOT_COMPARED = ("lr", "params", "fused", "foreach", "role")


class OptimizerState:
    """Save and restore the state of an optimizer by parameter name.

    ``torch.optim.Optimizer.load_state_dict`` matches parameters by their order and also restores the saved learning
    rates and weight decays, so config changes made before a resume would be silently ignored.

    Args:
        optimizer: optimizer to save and restore.
        model: model that provides the parameter names. If None, or if the model lacks a parameter of the optimizer,
            parameters are matched by order.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module | None = None) -> None:
        self.optimizer = optimizer
        named = list(model.named_parameters()) if model is not None else []
        self._names = {id(parameter): name for name, parameter in named}
        shards = row_shards(model) if model is not None else {}
        self._shards = {id(parameter): shards[name] for name, parameter in named if name in shards}

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dict, its class name and the parameter names of each group as one dict.

        The state of parameters in ``row_shards`` has the rows of all ranks, so this must be called on every rank.
        """
        state = self.optimizer.state_dict()
        for number, (parameter, shard) in self._sharded(state["param_groups"]).items():
            parameter_state = state["state"].get(number, {})
            shards = {key: shard for key, value in parameter_state.items() if _is_like(value, parameter)}
            state["state"] = (
                state["state"] | {number: gather_rows(parameter_state, shards)} if parameter_state else state["state"]
            )
        if names := self._names_by_group():
            pairs = zip(state["param_groups"], names, strict=True)
            state["param_groups"] = [group | {"param_names": names} for group, names in pairs]
        return {"name": type(self.optimizer).__name__, **state}

    def form(self) -> dict[str, Any]:
        """Return a template of the structure of ``state_dict``; ``load_state_dict`` validates options and values."""
        return {"name": "", "state": {}, "param_groups": [{"params": [0], "param_names": [""]}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``, but keep the current options, and log the options that differ.

        Raises:
            ValueError: if ``state`` was saved with another optimizer class or for other parameters, or if an entry is
                missing or has the wrong shape or dtype.
        """
        name, current_groups = type(self.optimizer).__name__, self.optimizer.state_dict()["param_groups"]
        if state["name"] != name:
            raise ValueError(f"the state was saved with {state['name']}, but SOLVER.OPT is {name}")
        saved = self._saved_by_group(state["param_groups"])
        changed, groups, values = {}, [], {}
        for parameters, now in zip(saved, current_groups, strict=True):
            # Further entries of a group are state that the optimizer stores there, e.g. LAMB's step count.
            before = parameters[0][0] if parameters else now
            for option, value in now.items():
                if option not in _NOT_COMPARED and before.get(option) != value:
                    changed[option] = f"{option} {before.get(option)} -> {value}"
            kept = {key: value for key, value in before.items() if key != "param_names"}
            groups.append(kept | now)
            for number, (_, saved_number) in zip(now["params"], parameters, strict=True):
                if saved_number in state["state"]:
                    values[number] = state["state"][saved_number]
        refused = [option for option in _STRUCTURAL if option in changed]
        if refused:
            raise ValueError(f"an optimizer option changed, so the saved state cannot be used: {changed[refused[0]]}")
        if changed:
            logger.warning(
                "optimizer options differ from the checkpoint (saved -> current); using the current values: %s.\n"
                "  fix: to continue with the saved values, set their keys of SOLVER as in the earlier run",
                ", ".join(changed.values()),
            )
        for number, (parameter, shard) in self._sharded(current_groups).items():
            if isinstance(values.get(number), dict):
                state_of = values[number]
                local = dict.fromkeys(state_of, parameter)
                shards = {key: shard for key, value in state_of.items() if isinstance(value, torch.Tensor)}
                values[number] = select_rows(state_of, local, shards)
        for group, own_group in zip(groups, self.optimizer.param_groups, strict=True):
            for number, parameter in zip(group["params"], own_group["params"], strict=True):
                check_state(self.optimizer, own_group, parameter, values.get(number), f"state {number}")
        self.optimizer.load_state_dict({"state": values, "param_groups": groups})

    def _sharded(self, groups: list[dict[str, Any]]) -> dict[int, tuple[nn.Parameter, RowShard]]:
        """Find the parameters in ``row_shards``: index in the state dict with ``groups`` -> (parameter, its rows)."""
        return {
            number: (parameter, self._shards[id(parameter)])
            for group, actual_group in zip(groups, self.optimizer.param_groups, strict=True)
            for number, parameter in zip(group["params"], actual_group["params"], strict=True)
            if id(parameter) in self._shards
        }

    def _names_by_group(self) -> list[list[str]]:
        """List the parameter names of each group; empty if a parameter of the optimizer is not in the model."""
        groups = self.optimizer.param_groups
        if not all(id(parameter) in self._names for group in groups for parameter in group["params"]):
            return []
        return [[self._names[id(parameter)] for parameter in group["params"]] for group in groups]

    def _saved_by_group(self, saved: list[dict[str, Any]]) -> list[list[tuple[dict[str, Any], int]]]:
        """For each parameter in each group of this optimizer, find ``(saved group, index in the saved state)``.

        Raises:
            ValueError: if the optimizer and the saved state have different parameters.
        """
        group_ids = [[id(parameter) for parameter in group["params"]] for group in self.optimizer.param_groups]
        names = self._names_by_group()
        layout: Sequence[Sequence[object]]
        keys: Sequence[Sequence[object]]
        if names and all("param_names" in group for group in saved):
            saved_names = [group["param_names"] for group in saved]
            layout, keys = saved_names, names
            differ = {name for group in names for name in group} ^ {name for group in saved_names for name in group}
            if differ:
                raise ValueError(
                    f"{plural(len(differ), 'parameter is', 'parameters are')} missing from the checkpoint or the "
                    f"optimizer{examples(sorted(differ))}"
                )
        else:
            layout = keys = group_ids
        if [len(group["params"]) for group in saved] != [len(group) for group in layout]:
            raise ValueError(
                "the parameter groups differ from the checkpoint, which stores no parameter names to match them: set "
                "SOLVER.BIAS_LR_FACTOR, HEADS_LR_FACTOR, LR_FACTORS, WEIGHT_DECAY, WEIGHT_DECAY_BIAS and "
                "WEIGHT_DECAY_NORM as in the saved run"
            )
        saved_positions = {
            key: (group, number)
            for group, group_keys in zip(saved, layout, strict=True)
            for key, number in zip(group_keys, group["params"], strict=True)
        }
        return [[saved_positions[key] for key in group] for group in keys]


def _is_like(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape
