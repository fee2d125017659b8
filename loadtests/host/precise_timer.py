"""A kernel timer as a file descriptor, for any event loop (timerfd_create(2)).

    alarm = Alarm()
    alarm.set(clock() + 0.0123)      # alarm.fd becomes readable then, some 50 us late

The timers of event loops are rounded to milliseconds, which would be most of the error of a
measured TTFT.
"""

from __future__ import annotations

import ctypes
import os

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Alarm:
    """One timer. Setting it again replaces the earlier setting, whether or not it has expired."""

    def __init__(self) -> None:
        self.fd = int(_libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "no timer (timerfd_create)")
        # struct itimerspec: seconds and nanoseconds of an interval, which is not used, and of the
        # time of expiration.
        self._spec = (ctypes.c_long * 4)()
        self._address = ctypes.byref(self._spec)

    def set(self, moment: float) -> None:
        """Expire at `moment` on time.perf_counter (CLOCK_MONOTONIC), or at once if that is past."""
        seconds = int(moment)
        self._spec[2] = seconds
        self._spec[3] = max(1, int((moment - seconds) * 1e9))  # zero would disarm the timer
        if _libc.timerfd_settime(self.fd, _TFD_TIMER_ABSTIME, self._address, None) != 0:
            raise OSError(ctypes.get_errno(), "the timer cannot be set")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
