"""Every error a user can mend. Each message names the bad value and the remedy.

What only we can break is an `assert`, not one of these.
"""


class PacelineError(Exception):
    """Base of all of them; the CLI prints it in one line and exits 2."""


class ConfigError(PacelineError, ValueError):
    """An option, sampling parameter or speculative key that cannot be honoured."""


class ModelError(PacelineError):
    """A model that cannot be used."""


class ModelNotFound(ModelError):
    """No such file, folder or name; or it could not be fetched."""


class ModelFileError(ModelError):
    """A file that is truncated, corrupt, oversized or of an unknown kind."""


class RequestError(PacelineError, ValueError):
    """A prompt that cannot be run: empty, too long, too big for the KV cache."""


class RankError(PacelineError):
    """A process that runs a part of the model and has ended or does not answer."""


class HandoverError(PacelineError):
    """What another engine was to give of a prompt, and did not."""


class GrammarError(PacelineError, ValueError):
    """A schema, regex or grammar that does not compile or can never be satisfied."""


class ProcessorError(GrammarError):
    """A logits processor of the request that raised, or returned something else than logits."""
