"""The load balancer that engines without a gateway get."""

import pytest

from gateway.loadtest.scenario import ScenarioError
from gateway.loadtest.targets import Target, choose, parse_target


def targets(*texts: str) -> list[Target]:
    return [parse_target(text) for text in texts]


def test_the_least_busy_of_the_shortest_range_that_takes_the_prompt() -> None:
    short = "http://a:1,max_prompt_tokens=100"
    engines = targets(short, short, "http://a:2,max_prompt_tokens=1000", "http://a:3")
    engines[0].outstanding, engines[3].outstanding = 5, 9

    assert choose(engines, 100) == 1
    assert choose(engines, 101) == 2
    assert choose(engines, 5_000) == 3


def test_a_call_that_failed_goes_elsewhere_if_it_can() -> None:
    engines = targets("http://a:1", "http://a:2")
    engines[1].outstanding = 50

    assert choose(engines, 10) == 0
    assert choose(engines, 10, avoid=0) == 1
    assert choose(engines[:1], 10, avoid=0) == 0


def test_a_prompt_that_fits_none_goes_to_the_longest_range() -> None:
    engines = targets("http://a:1,max_prompt_tokens=10", "http://a:2,max_prompt_tokens=20")

    assert choose(engines, 30) == 1


def test_what_a_url_says() -> None:
    target = parse_target("https://host.example/base/")

    assert (target.host, target.port, target.secure, target.prefix) == ("host.example", 443, True, "/base")
    assert parse_target("http://[::1]:8080").authority == "[::1]:8080"


@pytest.mark.parametrize(
    "text",
    [
        "host:80",
        "ftp://host",
        "http://",
        "http://u:p@host",
        "http://host,max=3",
        "http://host,max_prompt_tokens=0",
    ],
)
def test_a_bad_target_is_refused(text: str) -> None:
    with pytest.raises(ScenarioError, match="target"):
        parse_target(text)
