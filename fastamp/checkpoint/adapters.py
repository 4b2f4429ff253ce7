"""Files with the LoRA adapters of a run, without the weights of the backbone that they adapt."""

import os
from typing import Any

import torch
from torch import nn

from fastamp.checkpoint.load_state import examples, load_model_state
from fastamp.checkpoint.safetensors_file import checksum
from fastamp.checkpoint.shards import full_state_form
from fastamp.checkpoint.weights_file import average_in, read_checkpoint, state_dict_in
from fastamp.layers.lora import is_adapter
from fastamp.utils.errors import WeightsError

ADAPTERS_OF = "adapters_of"
"""Key of the entry that marks a file of adapters: the checksum of the weights that the adapters were trained with."""

# The backbone, and the blocks that JPMHead copies from it.
_TRUNK = ("backbone.", "heads.b1.", "heads.b2.")
# Not frozen in the trunk: camera and view embeddings, and the statistics of batch norms.
_TRAINED = ("sie_embed", "running_mean", "running_var", "num_batches_tracked")


def base_tensors(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Select the tensors that training with adapters does not change: the frozen weights of the backbone."""
    return {
        name: tensor
        for name, tensor in state.items()
        if name.startswith(_TRUNK) and not is_adapter(name) and not name.endswith(_TRAINED)
    }


def adapters_in(state: dict[str, torch.Tensor], source: str | os.PathLike[str]) -> dict[str, Any]:
    """Build the entries of a file of adapters from the state dict of a model.

    Args:
        state: state dict of a model with adapters.
        source: origin of ``state``, for messages.

    Returns:
        ``"model"``: the adapters, the heads and the embeddings of cameras and views; ``"adapters_of"``: checksum of the
        other tensors.

    Raises:
        WeightsError: if ``state`` contains no adapters.
    """
    if not any(map(is_adapter, state)):
        raise WeightsError(
            f"{source} contains no LoRA adapters: it was trained with MODEL.LORA.RANK 0.\n"
            "  fix: run this command without --adapters"
        )
    base = base_tensors(state)
    return {"model": {name: state[name] for name in state if name not in base}, ADAPTERS_OF: checksum(base)}


def load_adapters(
    model: nn.Module,
    content: dict[str, Any],
    *,
    source: str | os.PathLike[str],
    base: str | os.PathLike[str],
    min_match: float = 0.9,
) -> None:
    """Load a file of adapters into a model, together with the weights that the adapters were trained with.

    Args:
        model: model with adapters of the same rank.
        content: content of the file, see ``adapters_in``.
        source: path of the file, for messages.
        base: file with the weights of the backbone, ``MODEL.LORA.BASE``; its heads are not used.
        min_match: see ``load_model_state``. Default 0.9.

    Raises:
        WeightsError: if ``base`` is empty or contains other weights than those in training, or if the adapters do not
            match the model; see also ``read_checkpoint`` and ``load_model_state``.
    """
    if not base:
        raise WeightsError(
            f"{source} contains only LoRA adapters and heads, not the weights of the backbone.\n"
            "  fix: set MODEL.LORA.BASE to the weights that the adapters were trained with"
        )
    adapters = state_dict_in(content, source)
    shapes, adapter_shapes = (
        {name: tuple(tensor.shape) for name, tensor in state.items() if is_adapter(name)}
        for state in (adapters, full_state_form(model))
    )
    if differ := sorted(
        name for name in shapes.keys() | adapter_shapes.keys() if shapes.get(name) != adapter_shapes.get(name)
    ):
        raise WeightsError(
            f"the adapters in {source} do not match the model: {len(differ)} tensors differ"
            f"{examples(differ)}.\n"
            "  fix: set MODEL.BACKBONE, MODEL.LORA.RANK and MODEL.LORA.TARGETS as in training"
        )
    of_base = read_checkpoint(base)
    load_model_state(
        model,
        state_dict_in(average_in(of_base), base),
        content=of_base,
        source=f"{base} and {source}",
        min_match=min_match,
        fit=lambda converted: base_tensors(converted) | adapters,
    )
    if checksum(base_tensors(model.state_dict())) != content[ADAPTERS_OF]:
        raise WeightsError(
            f"the adapters in {source} were trained with other weights than those in {base}.\n"
            "  fix: set MODEL.LORA.BASE to the weights of the training, and the size of the images as in training"
        )
