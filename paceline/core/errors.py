"""Every error a user can mend. Each message names the bad value and the remedy.

    PacelineError
    ├── ConfigError         an option, sampling parameter or speculative key that cannot be honoured
    ├── ModelError
    │   ├── ModelNotFound   no such file, folder or name; or it could not be fetched
    │   └── ModelFileError  truncated, corrupt, oversized or of an unknown kind
    ├── RequestError        a prompt that cannot be run: empty, too long, too big for the KV cache
    └── GrammarError        a schema, regex or grammar that does not compile or can never be satisfied

What only we can break is an `assert`, not one of these.
"""


class PacelineError(Exception):
    """Base of all errors that name a value and a remedy; the CLI prints it in one line and exits 2."""


class ConfigError(PacelineError, ValueError):
    """An option that cannot be honoured."""


class ModelError(PacelineError):
    """A model that cannot be used."""


class ModelNotFound(ModelError):
    """No such model, or it could not be fetched."""


class ModelFileError(ModelError):
    """A model file that is truncated, corrupt, oversized or of an unknown kind."""


class RequestError(PacelineError, ValueError):
    """A prompt that cannot be run as asked."""


class GrammarError(PacelineError, ValueError):
    """A structured-output constraint that does not compile or cannot be satisfied."""
