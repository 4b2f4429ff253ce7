"""Config keys that are not declared by a component, grouped into modules by topic.

A string in place of a key, e.g. ``"INPUT.FLIP"``, marks the position of a component's keys in listings. The component
declares these keys in its own file (see ``component_keys``). Component keys without a marker are listed last in their
section.

Durations are in epochs or iterations (attempted optimizer steps), sizes in pixels, height before width. Batch sizes are
over all ranks. Fractions and probabilities are in 0..1.
"""

from fastamp.config.key import Key
from fastamp.config.sections import amp, data, evaluation, model, run, solver, tracking

SECTIONS: tuple[Key | str, ...] = (
    *run.KEYS, *tracking.KEYS, *model.KEYS, *data.KEYS, *solver.KEYS, *amp.KEYS, *evaluation.KEYS,
)  # fmt: skip
