"""The error tree: what a user can mend, and what only we can.

PacelineError
|-- UserError               the caller's mistake; the text names the remedy; CLI exit code 2
|   |-- ConfigError         a setting, alone or against another
|   |-- ModelError          a model directory, file or architecture that cannot be served
|   `-- RequestError        one request; becomes an OpenAI error object, harms nothing else
`-- EngineError             the engine failed; requests may be resumed on a new epoch
    |-- EngineStopped       it was shut down on purpose
    |-- RankLost            a rank died
    |-- StepDeadlineExceeded a rank hung
    `-- ProtocolError       a peer broke the order of messages
"""


class PacelineError(Exception):
    """Root of everything this package raises on purpose."""


class UserError(PacelineError, ValueError):
    """A mistake of the caller. The message is one line and says what to do instead."""


class ConfigError(UserError):
    """A setting that is unknown, out of range, or contradicts another."""


class ModelError(UserError):
    """A model that is absent, unsafe, incomplete, or of an architecture we do not have."""


class RequestError(UserError):
    """A request that is refused before it reaches the engine.

    `status`, `code` and `param` fill the OpenAI error object; `retry_after_s` the header of that name.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_value",
        param: str | None = None,
        error_type: str = "invalid_request_error",
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.error_type = error_type
        self.retry_after_s = retry_after_s


class EngineError(PacelineError):
    """The engine cannot go on in this epoch."""


class EngineStopped(EngineError):
    """The engine was shut down; nothing is wrong."""


class RankLost(EngineError):
    """A rank's process ended while the engine needed it."""


class StepDeadlineExceeded(EngineError):
    """A rank did not answer a plan within `step_deadline_s`."""


class ProtocolError(EngineError):
    """A message arrived out of order, or is of a kind its receiver never takes."""
