"""A kernel timer (timerfd) as a file descriptor, for any event loop.

    alarm = Alarm()
    alarm.set(clock() + 0.0123)      # alarm.fd becomes readable then, some 50 us late

Event loops round their own timers to milliseconds, which would be most of a TTFT's error.
"""

from __future__ import annotations

import ctypes
import os

_CLOCK_MONOTONIC, _ABSOLUTE = 1, 1
_libc = ctypes.CDLL(None, use_errno=True)


class Alarm:
    """One alarm. Setting it again replaces the last setting, whether or not it has fired."""

    def __init__(self) -> None:
        self.fd = int(_libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "no timer (timerfd_create)")
        # struct itimerspec: an interval (not used), and when; each in seconds and nanoseconds
        self._spec = (ctypes.c_long * 4)()
        self._address = ctypes.byref(self._spec)

    def set(self, moment: float) -> None:
        """Ring at `moment` on time.perf_counter (CLOCK_MONOTONIC); at once where that is past."""
        whole = int(moment)
        self._spec[2] = whole
        self._spec[3] = max(1, int((moment - whole) * 1e9))  # all zero would mean never
        if _libc.timerfd_settime(self.fd, _ABSOLUTE, self._address, None) != 0:
            raise OSError(ctypes.get_errno(), "the timer cannot be set")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
