"""The gRPC door: the RPCs of `paceline.proto` and the standard health service over the engine of a replica.

Serve's ingress owns the sockets, balances the replicas and passes on cancellations and deadlines (within
about a millisecond, behind HAProxy; its Python proxy does not, so there is no gRPC without HAProxy). The
methods also work as a servicer of grpc.aio, which is how most tests run them.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from grpc_health.v1 import health_pb2

from ...cluster.errors import EngineError, RequestError
from ..api.accounting import Account
from ..api.front import Front
from ..api.gathered import Gathered, Piece
from ..api.guard import ReadAhead
from ..api.keys import Caller
from ..api.pieces import pieces_of
from ..api.validate import Job
from ..tracing import RequestTrace
from . import paceline_pb2 as pb
from .calls import answering
from .replies import chunk_of, metrics_of, usage_of, whole
from .requests import prepare, prepare_tokens
from .status import CallContext, answer_error, metadata

SERVICE = pb.DESCRIPTOR.services_by_name["Paceline"].full_name
# As Serve's `grpc_servicer_functions`; it asks the deployment for a method of each RPC's name.
SERVICER_FUNCTIONS = [
    "paceline.deploy.grpc.paceline_pb2_grpc.add_PacelineServicer_to_server",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
]
THREADED_REQUEST_BYTES = 16 << 10  # longer requests are tokenized beside the event loop
WATCH_S = 1.0  # how often the health of a watched service is looked at

_HealthStatus = health_pb2.HealthCheckResponse.ServingStatus
# Newer than the types that pyright has of this package.
_HealthListResponse: Any = health_pb2.HealthListResponse  # pyright: ignore[reportAttributeAccessIssue]


class GrpcMethods:
    """The RPCs by their names in the proto files. Whoever inherits calls `open_grpc` before the first one."""

    def open_grpc(
        self,
        front: Front,
        abort_elsewhere: Callable[[str, str], Awaitable[Sequence[bool]]] | None = None,
    ) -> None:
        """`abort_elsewhere` asks the other replicas for `abort_request`: an Abort comes to any of them."""
        self._front = front
        self._abort_elsewhere = abort_elsewhere
        self._calls: dict[tuple[str, str], ReadAhead[Piece]] = {}  # by caller and its request_id, for Abort

    async def Generate(self, request: pb.GenerateRequest, grpc_context: CallContext) -> pb.GenerateResponse:
        served = self._front.served
        with answering(self._front, f"/{SERVICE}/Generate", grpc_context) as record:
            caller = self._admit(request.ByteSize(), grpc_context)
            job = await self._prepare(request, is_stream=False)
            reply_id, account = f"gen-{uuid.uuid4().hex}", Account(job)
            record.usage = account.usage
            choices = [Gathered() for _ in job.choices]
            async with self._open(request, caller, reply_id, job, record.trace) as pieces:
                async for piece in pieces:
                    choices[piece.index].add(piece)
                    account.add(piece)
            return whole(reply_id, served.name, job, choices, account, served.tokenizer)
        return pb.GenerateResponse()

    async def GenerateStream(
        self, request: pb.GenerateRequest, grpc_context: CallContext
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        tokenizer = self._front.served.tokenizer
        with answering(self._front, f"/{SERVICE}/GenerateStream", grpc_context) as record:
            caller = self._admit(request.ByteSize(), grpc_context)
            job = await self._prepare(request, is_stream=True)
            reply_id, account = f"gen-{uuid.uuid4().hex}", Account(job)
            record.usage = account.usage
            async with self._open(request, caller, reply_id, job, record.trace) as pieces:
                for choice in job.choices:
                    if choice.echoed:
                        yield pb.GenerateChunk(id=reply_id, index=choice.index, text=choice.echoed)
                async for piece in pieces:
                    account.add(piece)
                    yield chunk_of(reply_id, piece, tokenizer)
            totals = {"usage": usage_of(account), "metrics_json": metrics_of(account)}
            yield pb.GenerateChunk(id=reply_id, **totals)

    async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: CallContext) -> pb.TokenizeResponse:
        answer = pb.TokenizeResponse(max_model_len=self._front.served.max_model_len)
        with answering(self._front, f"/{SERVICE}/Tokenize", grpc_context):
            self._admit(request.ByteSize(), grpc_context)
            answer.token_ids.extend(await asyncio.to_thread(prepare_tokens, request, self._front.served))
        return answer

    async def Abort(self, request: pb.AbortRequest, grpc_context: CallContext) -> pb.AbortResponse:
        answer = pb.AbortResponse()
        with answering(self._front, f"/{SERVICE}/Abort", grpc_context):
            caller = self._caller(request.ByteSize(), grpc_context).name
            answer.is_aborted = await self.abort_request(caller, request.request_id)
            if not answer.is_aborted and self._abort_elsewhere is not None:
                answer.is_aborted = any(await self._abort_elsewhere(caller, request.request_id))
        return answer

    async def abort_request(self, caller: str, request_id: str) -> bool:
        """End the request of this name, and of this caller's, if it runs here."""
        pieces = self._calls.get((caller, request_id))
        if pieces is not None:
            pieces.stop(RequestError("the request was aborted", status=499, code="aborted"))
        return pieces is not None

    async def Check(
        self, request: health_pb2.HealthCheckRequest, grpc_context: CallContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in ("", SERVICE):
            error = RequestError(f"there is no service {request.service[:100]!r}", status=404)
            answer_error(grpc_context, error)
        return health_pb2.HealthCheckResponse(status=self._health(request.service))

    async def List(self, request: Any, grpc_context: CallContext) -> Any:
        del request, grpc_context
        statuses = {name: health_pb2.HealthCheckResponse(status=self._health(name)) for name in ("", SERVICE)}
        return _HealthListResponse(statuses=statuses)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: CallContext
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        del grpc_context
        told: _HealthStatus.ValueType | None = None
        while True:
            status = self._health(request.service)
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(WATCH_S)

    def _health(self, service: str) -> _HealthStatus.ValueType:
        if service not in ("", SERVICE):
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        try:
            self._front.check_health()
        except EngineError:
            return health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse.SERVING

    def _admit(self, num_bytes: int, context: CallContext) -> Caller:
        """The caller of a request for work. Raises RequestError for who may not call, or not now."""
        caller = self._caller(num_bytes, context)
        self._front.drain.check()
        caller.admit()
        return caller

    def _caller(self, num_bytes: int, context: CallContext) -> Caller:
        """Refuse who may not call and what is too large. Raises RequestError."""
        caller = self._front.keys.check(metadata(context, "authorization"))
        if caller is None:
            raise RequestError(
                "give a valid key as metadata: authorization = Bearer KEY", status=401, code="invalid_api_key"
            )
        if num_bytes > self._front.max_body_bytes:
            raise RequestError(
                f"the request is larger than {self._front.max_body_bytes} bytes, the limit of this server",
                status=413,
                code="request_too_large",
            )
        return caller

    async def _prepare(self, request: pb.GenerateRequest, *, is_stream: bool) -> Job:
        if request.ByteSize() > THREADED_REQUEST_BYTES:
            return await asyncio.to_thread(prepare, request, self._front.served, is_stream=is_stream)
        return prepare(request, self._front.served, is_stream=is_stream)

    @asynccontextmanager
    async def _open(
        self, request: pb.GenerateRequest, caller: Caller, reply_id: str, job: Job, trace: RequestTrace | None
    ) -> AsyncIterator[ReadAhead[Piece]]:
        """The pieces of all choices, under the name that Abort knows."""
        front, name = self._front, request.request_id
        call = (caller.name, name)
        if call in self._calls:
            raise RequestError(
                f"a request named {name[:100]!r} is running; choose another name",
                code="duplicate_request_id",
                param="request_id",
            )
        made = pieces_of(front, caller, reply_id, job, trace)
        async with aclosing(ReadAhead(made, front.abandoned_s)) as pieces:
            if name:
                self._calls[call] = pieces
            try:
                yield pieces
            finally:
                self._calls.pop(call, None)
