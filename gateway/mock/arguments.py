"""The options of `kvgate mock`: those of `vllm serve` by their names, and a few of the mock's own."""

import argparse
from dataclasses import dataclass

from gateway.mock.engine import POLICIES, EngineConfig
from gateway.mock.options import CONVERSIONS, RUNNERS, Options

_DEFAULT = EngineConfig()


@dataclass(frozen=True, slots=True)
class Opened:
    """How many servers listen where, and how they end."""

    host: str
    port: int
    engines: int
    speed: float
    shutdown_seconds: float
    die_with_parent: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_mock_arguments(parser.add_argument_group("the mock"))
    _add_engine_arguments(parser.add_argument_group("the engine, as in vLLM"))
    _add_server_arguments(parser.add_argument_group("the server, as in vLLM"))


def opened(args: argparse.Namespace) -> Opened:
    return Opened(
        host=args.host,
        port=args.port,
        engines=args.engines,
        speed=args.speed,
        shutdown_seconds=args.shutdown_timeout,
        die_with_parent=args.die_with_parent,
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Raises ValueError for sizes that make no engine."""
    return EngineConfig(
        model=(args.served_model_name or [args.model])[0],
        blocks=args.blocks,
        block_size=args.block_size,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        step_base_ms=args.step_base_ms,
        step_prefill_us=args.step_prefill_us,
        step_running_us=args.step_running_us,
        step_kv_us=args.step_kv_us,
        enable_prefix_caching=args.enable_prefix_caching,
        scheduling_policy=args.scheduling_policy,
        watermark=args.watermark,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        max_num_queued_reqs=args.max_num_queued_reqs,
        max_num_queued_tokens=args.max_num_queued_tokens,
        data_parallel_size=args.data_parallel_size,
    )


def server_options(args: argparse.Namespace) -> Options:
    """Raises ValueError for an option that has no meaning."""
    return Options(
        aliases=tuple(args.served_model_name or ())[1:],
        root=args.model,
        api_key=args.api_key,
        runner=args.runner,
        convert=args.convert,
        listens=args.listens,
        responses_store=args.responses_store,
        dev_mode=args.dev_mode,
        enable_request_id_headers=args.enable_request_id_headers,
        enable_prompt_tokens_details=args.enable_prompt_tokens_details,
        enable_per_request_metrics=args.enable_per_request_metrics,
        enable_server_load_tracking=args.enable_server_load_tracking,
        sse_keep_alive_interval_seconds=args.sse_keep_alive_interval,
        stream_interval=args.stream_interval,
        output_tokens=args.tokens,
        late_busy=args.late_busy,
    )


def _add_mock_arguments(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--engines", type=int, default=1, help="engines, on consecutive ports (default 1)")
    for name, text in (
        ("step_base_ms", "time of a step, whatever is in it"),
        ("step_prefill_us", "and per prefill token"),
        ("step_running_us", "and per sequence"),
        ("step_kv_us", "and per stored token"),
    ):
        _add_number(group, name, text)
    group.add_argument(
        "--speed", type=float, default=1.0, help="divides step times; inf = no time (default 1)"
    )
    group.add_argument("--tokens", type=int, help="output tokens of an answer (default: run to the limit)")
    group.add_argument(
        "--late-busy", action="store_true", help="streams meet the queue limits after their headers"
    )
    group.add_argument(
        "--dev-mode", action="store_true", help="vLLM's VLLM_SERVER_DEV_MODE=1: /pause, /sleep and others"
    )
    group.add_argument(
        "--listens", action="store_true", help="the model understands speech: /v1/audio/* with WAV files"
    )
    group.add_argument(
        "--responses-store", action="store_true", help="vLLM's VLLM_ENABLE_RESPONSES_API_STORE=1"
    )
    group.add_argument("--die-with-parent", action="store_true", help="end when the parent process ends")


def _add_number(group: "argparse._ArgumentGroup", name: str, text: str) -> None:
    """An option with the type and default of the mock's setting of that name."""
    default = getattr(_DEFAULT, name)
    flag = f"--{name.replace('_', '-')}"
    group.add_argument(flag, type=type(default), default=default, help=f"{text} (default {default:g})")


def _add_engine_arguments(group: "argparse._ArgumentGroup") -> None:
    text = f"num_gpu_blocks, null block included (default {_DEFAULT.blocks})"
    group.add_argument("--blocks", "--num-gpu-blocks-override", type=int, default=_DEFAULT.blocks, help=text)
    for name, text in (
        ("block_size", "tokens per block"),
        ("max_model_len", "longest context, in tokens"),
        ("max_num_seqs", "sequences that run at once"),
        ("max_num_batched_tokens", "tokens of a step"),
        ("long_prefill_token_threshold", "prefill tokens of one call in a step; 0 = no limit"),
    ):
        _add_number(group, name, text)
    for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
        group.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=0, help="503 beyond it; 0 = no limit (default)"
        )
    group.add_argument("--data-parallel-size", type=int, default=1, help="ranks, each with its own blocks")
    group.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="(default on)"
    )
    group.add_argument("--scheduling-policy", choices=POLICIES, default=_DEFAULT.scheduling_policy)
    group.add_argument("--watermark", type=float, default=0.0, help="share of blocks kept free at admission")


def _add_server_arguments(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--host", default="127.0.0.1")
    group.add_argument("--port", type=int, default=9001, help="0 takes a free port (default 9001)")
    group.add_argument("--model", default=_DEFAULT.model, help="the served name, unless one is given")
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="the first one and its aliases")
    group.add_argument("--runner", choices=RUNNERS, default=RUNNERS[0], help="pooling: embeds and scores")
    group.add_argument(
        "--convert", choices=CONVERSIONS, default=CONVERSIONS[0], help="what a model that pools does"
    )
    group.add_argument("--api-key", help="asked for under /v1, /v2 and /inference only")
    group.add_argument(
        "--shutdown-timeout",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="SIGTERM lets calls finish for so long (default 0: they are cut)",
    )
    group.add_argument("--sse-keep-alive-interval", type=float, default=0.0, metavar="SECONDS")
    group.add_argument("--stream-interval", type=int, default=1, metavar="TOKENS")
    for name in (
        "request-id-headers",
        "prompt-tokens-details",
        "per-request-metrics",
        "server-load-tracking",
    ):
        group.add_argument(f"--enable-{name}", action="store_true")
