"""The keys that belong to no single component, a module for each part of the program.

A text among them, e.g. ``"INPUT.FLIP"``, marks where the keys of that section stand in listings; the component that
reads them declares them in its own file (see ``component_keys``). The keys of a component that is not marked come last
in their section.

Lengths of time are in epochs or iterations (optimizer steps tried), sizes in pixels, height before width;
a batch counts the images over all ranks; a share or a probability lies in 0..1.
"""

from fastamp.config.key import Key
from fastamp.config.sections import amp, data, evaluation, model, run, solver

SECTIONS: tuple[Key | str, ...] = (*run.KEYS, *model.KEYS, *data.KEYS, *solver.KEYS, *amp.KEYS, *evaluation.KEYS)
