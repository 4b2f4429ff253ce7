"""Config keys that do not belong to a single component, one module per part of the program.

A string among them, e.g. ``"INPUT.FLIP"``, marks the position of a component's keys in listings; the component declares
them in its own file (see ``component_keys``). Keys of components without a marker come last in their section.

Durations are in epochs or iterations (attempted optimizer steps), sizes in pixels, height before width. Batch sizes are
over all ranks. Fractions and probabilities are in 0..1.
"""

from fastamp.config.key import Key
from fastamp.config.sections import amp, data, evaluation, model, run, solver

SECTIONS: tuple[Key | str, ...] = (*run.KEYS, *model.KEYS, *data.KEYS, *solver.KEYS, *amp.KEYS, *evaluation.KEYS)
