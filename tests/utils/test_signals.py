"""Setting and restoring signal handlers."""

import signal
import threading

import pytest

from fastamp.utils.signals import STOP_SIGNALS, handling, set_handler


def test_previous_signal_handlers_are_restored_after_the_context():
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    received = []
    with pytest.raises(ValueError), handling(lambda number, frame: received.append(number)):
        for number in STOP_SIGNALS:
            signal.raise_signal(number)
        with handling(signal.SIG_IGN, [signal.SIGUSR1]):
            signal.raise_signal(signal.SIGUSR1)
        raise ValueError
    assert received == list(STOP_SIGNALS)
    assert before == {number: signal.getsignal(number) for number in STOP_SIGNALS}


def test_no_signal_handler_is_set_outside_the_main_thread():
    found = []

    def run():
        with handling(signal.SIG_IGN):
            found.append(set_handler(signal.SIG_IGN))

    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [{}] and before == [signal.getsignal(number) for number in STOP_SIGNALS]
