"""What keeps one test from taking others along, and the machine from changing what they find."""

import contextlib
import io
import signal
import subprocess
import sys

import absl.logging

from jax_trainer.config.stop_signals import STOP_SIGNALS


def test_a_library_that_configures_logging_while_output_is_redirected_closes_no_stream():
    streams = sys.stdout, sys.stderr
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        absl.logging.get_absl_handler().close()  # as `logging.config.dictConfig` does with all handlers
    assert not any(stream.closed for stream in streams)


def test_a_test_that_closes_the_output_takes_no_other_along():
    for stream in (sys.stdout, sys.stderr):
        stream.close()
        assert not stream.closed


def test_signals_that_stop_a_training_are_not_ignored_in_the_tests():
    code = f"import signal; print(signal.SIG_IGN in map(signal.getsignal, {[int(one) for one in STOP_SIGNALS]}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found == "False\n" and signal.SIG_IGN not in map(signal.getsignal, STOP_SIGNALS)
