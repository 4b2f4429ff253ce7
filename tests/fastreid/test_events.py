"""Event storage of FastReID: reads of recorded values."""

from fastamp.fastreid.utils.events import EventStorage


class Counted:
    """Number on a device; counts its copies to the host."""

    def __init__(self):
        self.reads = 0

    def __float__(self):
        self.reads += 1
        return 1.0


def test_latest_values_are_read_once_without_the_history():
    values = [Counted() for _ in range(30)]
    with EventStorage() as storage:
        for value in values:
            storage.put_scalar("x", value, smoothing_hint=False)
            storage.step()
    assert storage.latest() == {"x": (1.0, 29)}
    assert [value.reads for value in values] == [0] * 29 + [1]
    assert storage.latest_with_smoothing_hint(20) == {"x": (1.0, 29)}
    assert [value.reads for value in values] == [0] * 29 + [2]
