"""What every other part may use: registry, errors, communication, events, logging, checkpoints."""
