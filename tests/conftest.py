"""Every test runs with the server's process settings, which hold only if they come before torch computes."""

from headwater.mixers.numerics import prepare_process

prepare_process(2)
