"""The wire protocol between services, version 1.

Every payload is one msgspec MessagePack struct, array-like, with an integer tag. Fields are only
ever appended, with defaults. Packed columns are little-endian: u16 is "<u2", u32 is "<u4".

Tags: 1-15 any link, 16-47 gateway <-> tokenizer, 48-79 tokenizer <-> scheduler, 80-111
scheduler <-> executor. Every message about a request carries (request_id, attempt); a receiver
ignores an attempt lower than the highest it has seen for that id.
"""

from __future__ import annotations

import enum

import msgspec

from quartet.shared.sampling_params import SamplingParams, TextParams, ToolParams

PROTOCOL_VERSION = 1
MIN_PROTOCOL_VERSION = 1


class Role(enum.IntEnum):
    GATEWAY = 1
    TOKENIZER = 2
    SCHEDULER = 3
    EXECUTOR = 4


class FinishReason(enum.IntEnum):
    """Why a choice ended; errors are no finish reason but a `Failed`. ABORT is what a gateway tells a
    client; no server sends it."""

    STOP = 1  # end-of-sequence token, stop token id or stop string
    LENGTH = 2  # max_tokens or the context is full
    ABORT = 3


class ErrorCode(enum.IntEnum):
    """The numbers of gRPC's status codes."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class Message(msgspec.Struct, array_like=True, tag=0):
    """Base of everything that is sent as a frame's payload."""


class Record(msgspec.Struct, array_like=True):
    """Base of what is only ever part of a message."""


# --- any link -------------------------------------------------------------------------------------


class ModelInfo(Record):
    """What the executor serves. `num_blocks` counts usable KV blocks of `block_size` tokens.
    `structured_output`: it can keep a row to a grammar."""

    name: str
    model_fingerprint: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    device: str
    structured_output: bool = False


class Hello(Message, tag=1):
    """Opens a session. The dialer sends it with a fresh session id, the binder answers with its own
    Hello in the same session. `incarnation` is random per process start."""

    protocol_version: int
    min_protocol_version: int
    role: Role
    name: str
    incarnation: int
    model: ModelInfo | None = None
    tokenizer_fingerprint: str = ""
    version: str = ""


class Refused(Message, tag=2):
    """The binder will not have this dialer (version, role or fingerprint); the reason is for people."""

    reason: str


class Reset(Message, tag=3):
    """The frame's session is not known here (any more): open a new one."""


class Heartbeat(Message, tag=4):
    """Sent every interval and at once when `ready` or `draining` changes.

    `progress` rises with each unit of work done and must move while `outstanding` is not 0.
    """

    progress: int
    outstanding: int
    ready: bool
    draining: bool = False


class ModelChanged(Message, tag=5):
    """Server -> client: the model it now stands for (an executor came, or came back different). A
    dialer sends it too where its model has changed since its first Hello of the session."""

    model: ModelInfo | None


class GetLoads(Message, tag=6):
    call_id: int


class Loads(Message, tag=7):
    """Gauges of the scheduler at the time of the call."""

    call_id: int
    num_running: int
    num_waiting: int
    num_preempted: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_requests_retained: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_preemptions_total: int = 0
    num_steps_total: int = 0
    num_prompt_tokens_total: int = 0
    num_cached_tokens_total: int = 0
    num_output_tokens_total: int = 0


class CallFailed(Message, tag=8):
    """A call (GetLoads, Encode, Decode, ResetPrefixCache) could not be answered."""

    call_id: int
    code: ErrorCode
    message: str
    field: str = ""


class Failed(Message, tag=9):
    """Server -> client: this attempt of the request is over with an error, for all its choices; nothing
    more comes of it."""

    request_id: int
    attempt: int
    code: ErrorCode
    message: str
    field: str = ""
    retry_after_ms: int = 0


class Abort(Message, tag=10):
    """Forget the request at once, a finished one too. Unknown ids are ignored."""

    request_id: int
    attempt: int


class Release(Message, tag=11):
    """The left has stored everything up to the final token: nothing need be retained."""

    request_id: int
    attempt: int


class ResetPrefixCache(Message, tag=12):
    """A call from the left, as GetLoads is: forget what blocks hold, so that no prompt finds any of it. What runs
    goes on, and leaves nothing to be found."""

    call_id: int


class PrefixCacheReset(Message, tag=13):
    """Answers ResetPrefixCache: so many blocks held a known prefix."""

    call_id: int
    num_blocks: int


class TokenLogprobs(Record):
    """Log-probabilities at one output position, floor -9999.0. `top` is in falling order.
    `text` holds the decoded bytes of token_id and then of each of `top`, filled in by the tokenizer."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = []
    text: list[bytes] = []


# --- gateway <-> tokenizer ------------------------------------------------------------------------


class TextPrompt(Record, tag=1):
    text: str
    add_special_tokens: bool = True


class ToolCall(Record):
    """`arguments` is a JSON object."""

    id: str
    name: str
    arguments: str


class ChatMessage(Record):
    """Content parts have been joined into one string by the gateway. `tool_calls` are what an assistant called;
    `tool_call_id` says which of them a tool's message answers."""

    role: str
    content: str
    name: str = ""
    tool_calls: list[ToolCall] = []
    tool_call_id: str = ""


class ChatPrompt(Record, tag=2):
    messages: list[ChatMessage]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, str | int | float | bool | None] = {}


class TokensPrompt(Record, tag=3):
    token_ids: list[int]


Prompt = TextPrompt | ChatPrompt | TokensPrompt


class ChoicePast(Record):
    """An unfinished choice and what of it is already known. `sent_bytes` counts the UTF-8 bytes of
    text that the client has; None means all text that `output_token_ids` let out. `sent_call_bytes`
    likewise for its tool calls, see Delta."""

    index: int
    output_token_ids: list[int] = []
    sent_bytes: int | None = None
    sent_call_bytes: int | None = None


class Submit(Message, tag=16):
    """Gateway -> tokenizer: generate. `choices` names the unfinished choices with their pasts. `tools` are for
    the template of a ChatPrompt, and for what is looked for in the output, whatever the prompt. `trace_context` is a
    W3C traceparent under which spans are recorded; "" or anything else: none are."""

    request_id: int
    attempt: int
    prompt: Prompt
    sampling: SamplingParams
    text: TextParams
    choices: list[ChoicePast]
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    prompt_logprobs_start: int = 0
    tools: ToolParams | None = None
    read_prefix_cache: bool = True
    write_prefix_cache: bool = True
    trace_context: str = ""


class Attach(Message, tag=17):
    """Gateway -> tokenizer: a client of a gateway that died wants the rest. `next_index[c]` is the
    number of output tokens of choice c that the client has (a missing choice has none)."""

    request_id: int
    attempt: int
    next_index: dict[int, int]


class Attached(Message, tag=18):
    """Tokenizer -> gateway: the request lives here. `submit` could be submitted again as it is:
    its prompt is TokensPrompt and its choices' pasts are cut to what the client has. Deltas from
    next_index follow, for a choice that has finished at least the last one."""

    request_id: int
    attempt: int
    submit: Submit


class Accepted(Message, tag=19):
    request_id: int
    attempt: int
    prompt_token_ids: list[int]


class ToolCallDelta(Record):
    """Part of the choice's call number `index`: its `id` and `name` come with the first part, and `arguments`
    joined are a JSON object."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Delta(Record):
    """Output tokens [start, start + len(token_ids)) of one choice and the text they let out.

    Text may be held back (half a character, a possible stop string) while its ids are told, so
    `text` may be empty or belong to earlier tokens. `num_text_bytes` is the length of all text let
    out so far, this delta's included. The last delta of a choice has a finish_reason; with a stop
    string, token_ids end with the token that completed it. `num_cached_tokens` counts the prompt tokens
    found in the prefix cache when the choice first ran.

    Tool calls are let out likewise, beside the text, of which they are no part. `num_call_bytes` is the
    length of all of them so far: a call's id and name count as one byte, its arguments by UTF-8.
    """

    request_id: int
    attempt: int
    index: int
    start: int
    token_ids: list[int]
    text: str
    num_text_bytes: int
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    tool_calls: list[ToolCallDelta] = []
    num_call_bytes: int = 0


class Deltas(Message, tag=20):
    items: list[Delta]


class PromptLogprobs(Message, tag=21):
    """Entries for prompt positions [start, start + len(entries)); position 0 has no entry (None).
    On both the tokenizer's links."""

    request_id: int
    attempt: int
    start: int
    entries: list[TokenLogprobs | None]


class Encode(Message, tag=22):
    call_id: int
    prompt: Prompt
    tools: ToolParams | None = None


class Encoded(Message, tag=23):
    call_id: int
    token_ids: list[int]
    tokens: list[bytes]


class Decode(Message, tag=24):
    call_id: int
    token_ids: list[int]
    skip_special_tokens: bool = False


class Decoded(Message, tag=25):
    call_id: int
    text: str


# --- watching: on both the tokenizer's links, but for what the executor is told ---------------------


class RequestState(enum.IntEnum):
    """Of a choice in the scheduler."""

    WAITING = 1
    PREEMPTED = 2  # has been running, here or at another scheduler, and goes first
    RUNNING = 3
    FINISHED = 4
    DROPPED = 5  # aborted or failed


class RequestEvent(enum.IntEnum):
    """What happens to a choice. FIRST_TOKEN is the first one since it was admitted."""

    QUEUED = 1
    ADMITTED = 2
    FIRST_TOKEN = 3
    PREEMPTED = 4
    FINISHED = 5
    DROPPED = 6


class Watch(Message, tag=26):
    """Rightwards: tell what happens, from a full account on, at most every `interval_ms`; 0: no more. Not answered;
    what it leads to is WatchEvents, or WatchEnded."""

    interval_ms: int


class StepSpan(Record):
    """A part of an executor's step: microseconds from its start on."""

    phase: str
    start_us: int
    duration_us: int


class WatchedChunk(Record):
    """A chunk of a prefill."""

    request_id: int
    index: int
    num_tokens: int


class WatchedStep(Record):
    """A step whose result has come, or is `lost`. `scheduled_at` and `returned_at` are the scheduler's wall clock in
    seconds, `started_at` the executor's; without it (0.0) nothing is known of the executor's part. The numbers of
    requests are those after scheduling. `chunks` has the first MAX_STEP_CHUNKS prefills."""

    epoch: int
    step_id: int
    scheduled_at: float
    returned_at: float
    schedule_us: int
    update_us: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_running: int
    num_waiting: int
    num_preempted: int
    chunks: list[WatchedChunk]
    lost: bool = False
    started_at: float = 0.0
    spans: list[StepSpan] = []


class WatchedRequest(Record):
    """A choice, new or changed. Its table is its first `table_start` entries as told before, then `table` (u32)."""

    request_id: int
    index: int
    state: RequestState
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_preemptions: int
    table_start: int
    table: bytes
    priority: int = 0
    tenant: str = ""
    arrived_at: float = 0.0


class WatchedEvent(Record):
    at: float
    request_id: int
    index: int
    what: RequestEvent


class WatchedService(Record):
    """A service, as it or its neighbour sees it."""

    role: Role
    name: str
    incarnation: int
    version: str
    ready: bool
    draining: bool
    stalled: bool


class WatchEvents(Message, tag=27):
    """Leftwards: what has happened since the last one. `seq` rises by one; with 0 nothing told before holds: all
    blocks are free and nameless, no request is there.

    Columns of changed blocks: `block_ids` u32, `block_refs` u16 (65535: that many or more), `block_hashes` and
    `block_parents` 8 bytes each, the beginnings of the block's hash and of that of the block before it, `block_hits`
    u32. Hash 0: it holds no whole known prefix. Parent 0: not known; all ones: it is the first of its prefix.
    """

    incarnation: int
    seq: int
    at: float
    num_blocks: int
    block_size: int
    num_free_blocks: int
    num_cached_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    num_running: int
    num_waiting: int
    num_preempted: int
    num_steps_total: int
    num_preemptions_total: int
    num_prompt_tokens_total: int
    num_cached_tokens_total: int
    num_output_tokens_total: int
    block_ids: bytes
    block_refs: bytes
    block_hashes: bytes
    block_parents: bytes
    block_hits: bytes
    steps: list[WatchedStep]
    num_steps_dropped: int
    requests: list[WatchedRequest]
    num_requests_more: int
    request_events: list[WatchedEvent]
    services: list[WatchedService]


class WatchEnded(Message, tag=28):
    """Tokenizer -> gateway: there is no scheduler. When one is there again its events follow by themselves."""


class WatchSpans(Message, tag=29):
    """Gateway -> tokenizer: whether WatchedSpans come from now on. Not answered."""

    enabled: bool


class WatchedSpan(Record):
    """A part of a tokenizer's work; `at` is its wall clock in seconds when it began. Without a `request_id` it was
    done for all requests of a step."""

    name: str
    at: float
    duration_us: int
    num_tokens: int
    request_id: int | None = None


class WatchedSpans(Message, tag=30):
    """Tokenizer -> gateway: what it has done since the last ones."""

    spans: list[WatchedSpan]


# --- tokenizer <-> scheduler ----------------------------------------------------------------------


class NewRequest(Message, tag=48):
    """Tokenizer -> scheduler: generate the unfinished choices. Sent again, with longer pasts, to a
    scheduler that may know the request already. All ids are given, cached ones too.

    `eos_token_ids` end a choice unless sampling.ignore_eos. max_tokens is resolved (never None).
    Where sampling.structured is set, `vocabulary` is the fingerprint of a Vocabulary sent before.
    """

    request_id: int
    attempt: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: list[int]
    choices: list[ChoicePast]
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    prompt_logprobs_start: int = 0
    read_prefix_cache: bool = True
    write_prefix_cache: bool = True
    vocabulary: str = ""
    trace_context: str = ""


class Finish(Message, tag=49):
    """Tokenizer -> scheduler: a stop string ended the choice after num_output_tokens. The scheduler
    truncates, frees the blocks and retains the choice until Release."""

    request_id: int
    attempt: int
    index: int
    num_output_tokens: int


class Output(Record):
    """Output tokens [start, start + len(token_ids)) of one choice; none when it ends without a new one."""

    request_id: int
    attempt: int
    index: int
    start: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0


class Outputs(Message, tag=50):
    """Scheduler -> tokenizer: all that one step brought for this tokenizer's requests."""

    items: list[Output]


class Vocabulary(Message, tag=51):
    """The bytes of tokens [start, start + len(tokens)) of a vocabulary, those of special tokens as they are written.

    Tokenizer -> scheduler before the session's first NewRequest that names it, and scheduler -> executor before
    the epoch's first plan that does; all parts in order. `special_token_ids` are of this part.
    """

    fingerprint: str
    num_tokens: int
    start: int
    tokens: list[bytes]
    special_token_ids: list[int] = []


# --- scheduler <-> executor -----------------------------------------------------------------------


class Takeover(Message, tag=80):
    """Scheduler -> executor: drop all rows and plans, and be mine. KV memory and its hashes stay."""

    incarnation: int


class Granted(Message, tag=81):
    """Executor -> scheduler: plans of `epoch` are accepted, the first with step_id 0. Blocks that
    hold a whole known prefix: `block_ids` u32 column, `block_hashes` 32 bytes each, same order. Two
    blocks may hold the same."""

    epoch: int
    block_ids: bytes
    block_hashes: bytes


class NewRow(Record):
    """A request enters the persistent batch, fresh or after preemption, with all its ids.

    `token_ids` u32: prompt then outputs. Tokens [0, num_computed_tokens) are in KV memory already,
    in the first of `block_ids` (u32, in logical order, reaching as far as this step needs).
    `hash_root` is block 0's parent hash (the extra keys). `eos_token_ids` is empty with ignore_eos.
    Prompt log-probabilities are due from position `prompt_logprobs_start` (-1: none). What the row
    writes is not offered unless `write_prefix_cache`. `vocabulary`: see NewRequest.
    """

    req_index: int
    token_ids: bytes
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: bytes
    sampling: SamplingParams
    eos_token_ids: list[int]
    choice_index: int
    hash_root: bytes
    prompt_logprobs_start: int = -1
    write_prefix_cache: bool = True
    vocabulary: str = ""
    trace_context: str = ""


class StepPlan(Message, tag=82):
    """One forward pass, as a delta against the executor's rows. Applied in the order of fields.

    Rows in `removed` (u16) leave; `new_rows` enter; block_ids[i] (u32) is appended to the table of
    row block_rows[i] (u16). `decode_rows` is a bit set over req_index (bit r & 7 of byte r >> 3):
    each computes its one next token (the one sampled last) and samples. `prefill_rows` (u16) compute
    `prefill_counts` (u32) further tokens each; a row whose count reaches its known tokens samples.
    Sampled tokens come back in batch order: decode rows rising, then prefill rows in plan order.
    """

    epoch: int
    step_id: int
    removed: bytes
    new_rows: list[NewRow]
    block_rows: bytes
    block_ids: bytes
    decode_rows: bytes
    prefill_rows: bytes
    prefill_counts: bytes


class RowPromptLogprobs(Record):
    """Entries for prompt positions [start, start + len(entries)) of one row."""

    req_index: int
    start: int
    entries: list[TokenLogprobs | None]


class StepResult(Message, tag=83):
    """Executor -> scheduler: `token_ids` u32, one per sampling row in batch order; 0xFFFFFFFF where
    that row failed (see `errors`). `logprobs` has an entry per sampling row when any row asked. `invalid_rows` are
    those of `errors` that failed by what was asked of them: structured output that leads nowhere."""

    epoch: int
    step_id: int
    token_ids: bytes
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: list[RowPromptLogprobs] = []
    errors: list[tuple[int, str]] = []
    invalid_rows: list[int] = []


class PlanRefused(Message, tag=84):
    """Executor -> scheduler: nothing was applied (a gap in step_id, an old epoch, or a plan that
    contradicts the rows). Only a new Takeover leads on."""

    epoch: int
    step_id: int
    reason: str


class StepFailed(Message, tag=85):
    """Executor -> scheduler: the step raised. Its hashes and those of later plans are dropped; only
    a new Takeover leads on."""

    epoch: int
    step_id: int
    message: str


class EraseHashes(Message, tag=86):
    """Scheduler -> executor: what blocks hold is not known any more, and rows that are there now record nothing.
    Not answered; outside of any epoch."""


class WatchSteps(Message, tag=87):
    """Scheduler -> executor: whether a StepTimed goes before each result from now on; not after a new Takeover."""

    enabled: bool


class StepTimed(Message, tag=88):
    """Executor -> scheduler: where the time of a step went. `started_at` is its wall clock in seconds."""

    epoch: int
    step_id: int
    started_at: float
    spans: list[StepSpan]


AnyMessage = (
    Hello | Refused | Reset | Heartbeat | ModelChanged | GetLoads | Loads | CallFailed | Failed | Abort | Release
    | ResetPrefixCache | PrefixCacheReset
    | Submit | Attach | Attached | Accepted | Deltas | PromptLogprobs | Encode | Encoded | Decode | Decoded
    | Watch | WatchEvents | WatchEnded | WatchSpans | WatchedSpans
    | NewRequest | Finish | Outputs | Vocabulary
    | Takeover | Granted | StepPlan | StepResult | PlanRefused | StepFailed | EraseHashes
    | WatchSteps | StepTimed
)  # fmt: skip

FAILED_TOKEN_ID = 0xFFFFFFFF
LOGPROB_FLOOR = -9999.0

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(payload: bytes | memoryview) -> AnyMessage:
    """Raises msgspec.DecodeError (a ValueError) when the payload is not a message of this protocol."""
    return _decoder.decode(payload)
