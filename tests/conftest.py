"""Of all tests: hypothesis judges what is right, not how fast this machine is; and Ctrl-C reaches
what a test starts, in the background too, where a shell lets it be ignored."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("paceline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("paceline")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
