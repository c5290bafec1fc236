"""One tree of errors. A message carries both numbers: what was asked for and what there is."""


class HeadwaterError(Exception):
    """Base of every error that Headwater raises on purpose."""


class OutOfPages(HeadwaterError):
    """A reservation needs more pages than are free or could be evicted. Nothing was changed."""

    def __init__(self, needed: int, free: int, evictable: int) -> None:
        super().__init__(f"needs {needed:,} pages; {free:,} are free and {evictable:,} could be evicted")
        self.needed, self.free, self.evictable = needed, free, evictable


class PlanClosed(HeadwaterError):
    """A plan was committed or abandoned a second time. Nothing was changed."""


class RequestTooLarge(HeadwaterError):
    """A request that no amount of waiting could serve: longer than the model or than the memory."""


class CheckpointError(HeadwaterError):
    """A model folder that cannot be loaded; the message names the file and the tensor or key."""


class ConfigError(HeadwaterError):
    """A setting that is out of range or contradicts another; the message names both values."""


class TemplateError(HeadwaterError):
    """A chat template that fails on the messages it was given."""


class EngineStopped(HeadwaterError):
    """The engine takes no more requests."""
