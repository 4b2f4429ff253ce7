"""An optimizer's part of a checkpoint: its state continues, its options are those of the config."""

import logging
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fastamp.amp.step import groups_by_value
from fastamp.checkpoint.load_state import examples
from fastamp.solver.state_layout import check_state

logger = logging.getLogger(__name__)

# Options that decide what the state consists of.
_STRUCTURAL = ("amsgrad", "centered")
_NOT_COMPARED = ("lr", "params", "fused", "foreach", "role")


class OptimizerState:
    """Save and restore what an optimizer has accumulated, by the names of the parameters.

    torch's own ``load_state_dict`` goes by the order of the parameters, and also restores the learning rates and weight
    decays that were saved, so that a config that was changed before a resume would be ignored without a message.

    Args:
        optimizer: the optimizer.
        model: names its parameters; None, or a model without some of them, goes by their order.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module | None = None) -> None:
        self.optimizer = optimizer
        named = list(model.named_parameters()) if model is not None else []
        self._names = {id(parameter): name for name, parameter in named}
        self._positions = {id(parameter): number for number, (_, parameter) in enumerate(named)}

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dict with the name of its class and the names of each group's parameters."""
        state = self.optimizer.state_dict()
        if names := self._names_by_group():
            pairs = zip(state["param_groups"], names, strict=True)
            state["param_groups"] = [group | {"param_names": own} for group, own in pairs]
        return {"name": type(self.optimizer).__name__, **state}

    def form(self) -> dict[str, Any]:
        """Return what every optimizer's state is like; options may differ, and values are looked at one by one."""
        return {"name": "", "state": {}, "param_groups": [{"params": [0], "param_names": [""]}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state`` with this optimizer's own options; log those that differ.

        Raises:
            ValueError: ``state`` is of another optimizer, or of other parameters.
        """
        name, own = type(self.optimizer).__name__, self.optimizer.state_dict()["param_groups"]
        if state["name"] != name:
            raise ValueError(f"it was trained with {state['name']}, SOLVER.OPT is {name} now")
        saved = self._saved_by_group(state["param_groups"])
        changed, groups, values = {}, [], {}
        for parameters, now in zip(saved, own, strict=True):
            # What a group has beyond its options is state that the optimizer keeps there, e.g. LAMB's count of steps.
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
            raise ValueError(f"its state has no place for a changed option: {changed[refused[0]]}")
        if changed:
            logger.warning("the optimizer's options differ from the checkpoint's: %s", ", ".join(changed.values()))
        for group, own_group in zip(groups, self.optimizer.param_groups, strict=True):
            for number, parameter in zip(group["params"], own_group["params"], strict=True):
                check_state(self.optimizer, group, parameter, values.get(number), f"state {number}")
        self.optimizer.load_state_dict({"state": values, "param_groups": groups})

    def _names_by_group(self) -> list[list[str]]:
        """Return the names of each group's parameters; empty if the model does not name all of them."""
        groups = self.optimizer.param_groups
        if not all(id(parameter) in self._names for group in groups for parameter in group["params"]):
            return []
        return [[self._names[id(parameter)] for parameter in group["params"]] for group in groups]

    def _saved_by_group(self, saved: list[dict[str, Any]]) -> list[list[tuple[dict[str, Any], int]]]:
        """Return, for each parameter of this optimizer's groups, the saved group that has it, and its number there.

        Raises:
            ValueError: the parameters differ.
        """
        own = [[id(parameter) for parameter in group["params"]] for group in self.optimizer.param_groups]
        names = self._names_by_group()
        if names and all("param_names" in group for group in saved):
            layout, keys = [group["param_names"] for group in saved], names
            differ = {name for group in names for name in group} ^ {name for group in layout for name in group}
            if differ:
                raise ValueError(f"{len(differ)} of its parameters differ{examples(sorted(differ))}")
        else:
            # Earlier versions saved no names, and had one group for each learning rate and weight decay.
            values = groups_by_value(self.optimizer, self._positions) if names else None
            layout = [[id(parameter) for parameter in group] for group in values] if values else own
            keys = own
        if [len(group["params"]) for group in saved] != [len(group) for group in layout]:
            raise ValueError(
                "its parameter groups differ: a checkpoint without the names of the parameters is resumed with the "
                "factors of learning rates and weight decays that it was trained with (SOLVER.BIAS_*, HEADS_LR_FACTOR, "
                "LR_FACTORS, WEIGHT_DECAY_*)"
            )
        saved_positions = {
            key: (group, number)
            for group, group_keys in zip(saved, layout, strict=True)
            for key, number in zip(group_keys, group["params"], strict=True)
        }
        return [[saved_positions[key] for key in group] for group in keys]
