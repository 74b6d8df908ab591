"""OpenAI's client and its responses, over two gateways and two replicas on one store, all real processes."""

from collections.abc import Iterator

import openai
import pytest

from tests.processes import GatewayProcess, Mock, wait_until, world

Running = tuple[list[GatewayProcess], list[str], list[Mock]]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with world() as here:
        mocks = [here.mock("--responses-store", "--step-base-ms", "2") for _ in range(2)]
        pools = [{"name": "only", "replicas": [mock.url for mock in mocks]}]
        config, keys = here.config(pools, {"name": "one"}, {"name": "two"})
        yield [here.gateway(config, keys[0]) for _ in range(2)], keys, mocks


def client(gateway: GatewayProcess, key: str = "") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key or gateway.key, max_retries=0)


def test_a_response(running: Running) -> None:
    with client(running[0][0]) as ours:
        answer = ours.responses.create(
            model="demo", input="hi", instructions="Be brief.", max_output_tokens=5
        )
    assert (answer.status, answer.usage and answer.usage.output_tokens) == ("incomplete", 5)
    assert len(answer.output_text.split()) == 5


def test_a_stream(running: Running) -> None:
    with (
        client(running[0][0]) as ours,
        ours.responses.stream(
            model="demo", input=[{"role": "user", "content": "hi"}], max_output_tokens=5
        ) as stream,
    ):
        events = list(stream)
        final = stream.get_final_response()
    assert [event.type for event in events].count("response.output_text.delta") == 5
    assert final.usage
    assert final.usage.output_tokens == 5


def test_any_gateway_finds_it_for_its_key(running: Running) -> None:
    gateways, keys, _ = running
    with client(gateways[0]) as here, client(gateways[1]) as there, client(gateways[1], keys[1]) as stranger:
        made = [here.responses.create(model="demo", input="hi", max_output_tokens=2) for _ in range(6)]
        for response in made:
            assert there.responses.retrieve(response.id).output_text == response.output_text
            with pytest.raises(openai.NotFoundError) as unknown:
                stranger.responses.retrieve(response.id)
            assert unknown.value.code == "not_found"
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
            there.responses.cancel(made[0].id)


def test_a_conversation_goes_on_at_any_gateway(running: Running) -> None:
    gateways, _, _ = running
    with client(gateways[0]) as here, client(gateways[1]) as there:
        for _ in range(4):
            first = here.responses.create(model="demo", input="hi", max_output_tokens=4)
            second = there.responses.create(
                model="demo", input="and?", max_output_tokens=4, previous_response_id=first.id
            )
            assert first.usage
            assert second.usage
            assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
        with pytest.raises(openai.NotFoundError, match="not found"):
            here.responses.create(model="demo", input="and?", previous_response_id="resp_nope")


def test_a_response_in_the_background_holds_its_blocks_until_it_is_over(running: Running) -> None:
    gateways, _, _ = running
    with client(gateways[0]) as here, client(gateways[1]) as there:
        begun = here.responses.create(model="demo", input="hi", max_output_tokens=9, background=True)
        assert begun.status == "queued"
        wait_until(lambda: there.responses.retrieve(begun.id).status == "incomplete", "it is over")
        assert there.responses.retrieve(begun.id).usage.output_tokens == 9  # type: ignore[union-attr]
        wait_until(gateways[0].is_quiet, "nothing is held")
        long = here.responses.create(model="demo", input="hi", max_output_tokens=60_000, background=True)
        assert not gateways[1].is_quiet()
        assert there.responses.cancel(long.id).status == "cancelled"
        wait_until(gateways[0].is_quiet, "nothing is held")


def test_a_stream_in_the_background_is_left_and_taken_up_again(running: Running) -> None:
    gateways, _, _ = running
    asked = {"model": "demo", "input": "hi", "background": True, "stream": True}
    with client(gateways[0]) as here, client(gateways[1]) as there:
        seen = []
        with here.responses.create(max_output_tokens=300, **asked) as stream:  # type: ignore[call-overload]
            for event in stream:
                seen.append(event)
                if len(seen) == 8:
                    break
        response_id = seen[0].response.id
        assert not gateways[1].is_quiet()
        rest = list(
            there.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number)
        )
        assert [event.sequence_number for event in seen + rest] == list(range(len(seen) + len(rest)))
        assert rest[-1].type == "response.completed"
        assert rest[-1].response.usage.output_tokens == 300  # type: ignore[union-attr]
        wait_until(gateways[0].is_quiet, "nothing is held")
        with here.responses.create(max_output_tokens=60_000, **asked) as stream:  # type: ignore[call-overload]
            there.responses.cancel(next(iter(stream)).response.id)
            with pytest.raises(openai.APIError, match="cancelled"):
                list(stream)
        wait_until(gateways[0].is_quiet, "nothing is held")


def test_a_stream_that_breaks_is_an_error(running: Running) -> None:
    gateways, _, mocks = running
    for mock in mocks:
        mock.reset()
        mock.fail("reset_after_events:6", count=1)
    with client(gateways[0]) as ours, pytest.raises(openai.APIError, match="engine failed"):
        list(ours.responses.create(model="demo", input="hi", max_output_tokens=50, stream=True))
    for mock in mocks:
        mock.reset()
    wait_until(gateways[0].is_quiet, "nothing is held")


def test_errors_are_typed(running: Running) -> None:
    with client(running[0][0]) as ours:
        with pytest.raises(openai.BadRequestError) as limit:
            ours.responses.create(model="demo", input="hi", max_output_tokens=0)
        assert limit.value.param == "max_output_tokens"
        with pytest.raises(openai.NotFoundError):
            ours.responses.create(model="nope", input="hi")
