"""An optimizer's part of a checkpoint: its state continues, its options are those of the config."""

import copy
import logging
from collections import defaultdict
from typing import Any

import torch
from torch.optim import Optimizer

from fastamp.utils.form import unlike

logger = logging.getLogger(__name__)

# Options that decide what the state consists of.
_STRUCTURAL = ("amsgrad", "centered")


class OptimizerState:
    """Save and restore what an optimizer has accumulated.

    torch's own ``load_state_dict`` also takes back the learning rates and weight decays that were saved, so that a
    config that was changed before a resume would be ignored without a word.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dict and its class's name."""
        return {"name": type(self.optimizer).__name__, **self.optimizer.state_dict()}

    def form(self) -> dict[str, Any]:
        """Return what every optimizer's state is like; options may differ, and values are looked at one by one."""
        return {"name": "", "state": {}, "param_groups": [{"params": [0]}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state`` with this optimizer's own options; log those that differ.

        Raises:
            ValueError: ``state`` is of another optimizer, or of other parameter groups.
        """
        name, own = type(self.optimizer).__name__, self.optimizer.state_dict()["param_groups"]
        if state["name"] != name:
            raise ValueError(f"it was trained with {state['name']}, SOLVER.OPT is {name} now")
        saved = state["param_groups"]
        if [len(group["params"]) for group in saved] != [len(group["params"]) for group in own]:
            raise ValueError(
                "its parameter groups are others: the factors of learning rates and weight decays (SOLVER.BIAS_*, "
                "HEADS_LR_FACTOR, LR_FACTORS, WEIGHT_DECAY_*) group the parameters"
            )
        changed = {}
        for before, now in zip(saved, own, strict=True):
            for option, value in now.items():
                if option not in ("lr", "params", "fused", "foreach") and before.get(option) != value:
                    changed[option] = f"{option} {before.get(option)} -> {value}"
        refused = [option for option in _STRUCTURAL if option in changed]
        if refused:
            raise ValueError(f"its state has no place for a changed option: {changed[refused[0]]}")
        if changed:
            logger.warning("the optimizer's options differ from the checkpoint's: %s", ", ".join(changed.values()))
        self._check_values(state["state"], saved)
        # What a group has beyond its options is state that the optimizer keeps there, e.g. LAMB's count of steps.
        groups = [before | now | {"params": before["params"]} for before, now in zip(saved, own, strict=True)]
        self.optimizer.load_state_dict({"state": state["state"], "param_groups": groups})

    def _check_values(self, values: Any, groups: list[dict[str, Any]]) -> None:
        """Raise ValueError where a parameter's state is not of the form that a step of this optimizer leaves."""
        numbers = [number for group in groups for number in group["params"]]
        own = [(group, parameter) for group in self.optimizer.param_groups for parameter in group["params"]]
        for number, (group, parameter) in zip(numbers, own, strict=True):
            saved = values.get(number)
            if not saved:  # never stepped, e.g. frozen
                continue
            expected = self._state_after_a_step(group, parameter)
            wrong = unlike(expected, saved, f"state {number}")
            wrong = wrong or ", ".join(str(each) for each in expected.keys() - saved.keys())
            if wrong:
                raise ValueError(f"what it has accumulated is wrong or missing: {wrong}")

    def _state_after_a_step(self, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        """Return the state that a step leaves of a parameter of a group.

        The twin that steps has no other parameter: one of the whole model would take its memory once more.
        """
        clone = parameter.detach().clone()
        clone.grad = torch.zeros_like(clone)
        options = {key: value for key, value in group.items() if key != "params"}
        twin = copy.copy(self.optimizer)
        twin.param_groups = [copy.deepcopy(options) | {"params": [clone]}]
        twin.state = defaultdict(dict)
        if parameter in self.optimizer.state:
            twin.state[clone] = copy.deepcopy(self.optimizer.state[parameter])
        twin.step()
        return dict(twin.state[clone])
