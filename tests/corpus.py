"""Texts of the kinds that prompts have, made from sentences written for this repository, by seed."""

import base64
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

SENTENCES = {
    "English": """The committee postponed its decision until the figures for March had been checked twice.
Please summarise the attached report in three paragraphs and list every open question at the end.
A gateway that admits every request only moves the waiting from its own queue into the engine.
She opened the window, listened to the rain for a while, and went back to her desk without a word.
Although the bridge was closed in 1987, cyclists still use the narrow path along the northern bank.
If the temperature drops below freezing overnight, cover the young plants with straw or an old blanket.
The second experiment failed for a simple reason: nobody had calibrated the scale since spring.
Our customers mostly complain about invoices that arrive late, not about the price of the service.
Write a friendly reply which declines the invitation but suggests a meeting in early autumn.
Heavy traffic, broken elevators and a lost passport turned an ordinary Tuesday into an adventure.""",
    "Chinese": """委员会决定把会议推迟到三月份的数据全部核对完毕之后再举行。
请用三段话概括所附的报告，并在最后列出所有尚未解决的问题。
她打开窗户听了一会儿雨声，然后一言不发地回到了书桌旁。
虽然这座桥在很多年前就关闭了，骑自行车的人仍然走北岸的小路。
如果夜里气温降到零度以下，请用稻草或者旧毯子盖住幼苗。
第二次实验失败的原因很简单：从春天开始就没有人校准过天平。
我们的客户大多抱怨发票来得太晚，而不是服务的价格太高。
人工智能正在改变许多行业，但是它需要大量的计算资源和电力。
写一封友好的回信，婉拒邀请，同时建议初秋再见面。
堵车、坏掉的电梯和丢失的护照把普通的星期二变成了一次冒险。""",
    "Japanese": """委員会は三月の数字がすべて確認されるまで決定を延期しました。
添付の報告書を三つの段落で要約し、最後に未解決の質問を並べてください。
彼女は窓を開けてしばらく雨の音を聞き、何も言わずに机に戻りました。
その橋は何年も前に閉鎖されましたが、自転車の人々は今も北岸の細い道を使っています。
夜に気温が氷点下になったら、若い苗を藁か古い毛布で覆ってください。
二回目の実験が失敗した理由は簡単で、春から誰も秤を調整していなかったのです。
お客様の苦情の多くは料金ではなく、請求書が遅れて届くことについてです。
人工知能は多くの産業を変えていますが、大量の計算資源と電力を必要とします。
招待を断りながら、初秋に会うことを提案する丁寧な返事を書いてください。
渋滞と壊れたエレベーターとなくしたパスポートで、普通の火曜日が冒険になりました。""",
    "Korean": """위원회는 삼월의 수치를 모두 두 번 확인할 때까지 결정을 미루었습니다.
첨부된 보고서를 세 문단으로 요약하고 마지막에 남은 질문을 모두 적어 주세요.
그녀는 창문을 열고 잠시 빗소리를 듣다가 아무 말 없이 책상으로 돌아갔습니다.
그 다리는 오래전에 폐쇄되었지만 자전거를 타는 사람들은 여전히 북쪽 길을 이용합니다.
밤에 기온이 영하로 떨어지면 어린 식물을 짚이나 낡은 담요로 덮어 주세요.
두 번째 실험이 실패한 이유는 간단합니다. 봄부터 아무도 저울을 조정하지 않았습니다.
고객들은 대부분 서비스 가격이 아니라 늦게 도착하는 청구서에 대해 불평합니다.
인공지능은 많은 산업을 바꾸고 있지만 막대한 계산 자원과 전력을 필요로 합니다.
초대를 정중히 거절하면서 초가을에 만나자고 제안하는 답장을 써 주세요.
교통 체증과 고장 난 승강기와 잃어버린 여권 때문에 평범한 화요일이 모험이 되었습니다.""",
    "Russian": """Комитет отложил решение до тех пор, пока данные за март не будут проверены дважды.
Пожалуйста, изложите отчёт в трёх абзацах и перечислите в конце все открытые вопросы.
Она открыла окно, немного послушала дождь и молча вернулась к своему столу.
Хотя мост закрыли много лет назад, велосипедисты до сих пор ездят по узкой тропе вдоль берега.
Если ночью температура опустится ниже нуля, накройте молодые растения соломой или старым одеялом.
Второй опыт не удался по простой причине: с весны никто не проверял весы.
Наши клиенты чаще жалуются на поздние счета, чем на стоимость обслуживания.
Искусственный интеллект меняет целые отрасли, но требует огромных вычислительных ресурсов.
Напишите вежливый ответ, в котором вы отказываетесь от приглашения и предлагаете встречу осенью.
Пробки, сломанный лифт и потерянный паспорт превратили обычный вторник в приключение.""",
    "German": """Der Ausschuss verschob seine Entscheidung, bis die Zahlen für März zweimal geprüft waren.
Bitte fassen Sie den beigefügten Bericht in drei Absätzen zusammen und nennen Sie am Ende alle offenen Fragen.
Sie öffnete das Fenster, hörte eine Weile dem Regen zu und ging wortlos zurück an ihren Schreibtisch.
Obwohl die Brücke vor Jahrzehnten gesperrt wurde, benutzen Radfahrer noch immer den schmalen Uferweg.
Falls die Temperatur nachts unter den Gefrierpunkt fällt, decken Sie die jungen Pflanzen mit Stroh ab.
Der zweite Versuch scheiterte aus einem einfachen Grund: Seit dem Frühling hatte niemand die Waage geeicht.
Unsere Kunden beschweren sich meistens über verspätete Rechnungen, nicht über den Preis der Dienstleistung.
Künstliche Intelligenz verändert ganze Wirtschaftszweige, braucht aber gewaltige Rechenleistung und Strom.
Schreiben Sie eine freundliche Antwort, die die Einladung ablehnt und ein Treffen im Frühherbst vorschlägt.
Stau, ein kaputter Aufzug und ein verlorener Reisepass machten aus einem gewöhnlichen Dienstag ein Abenteuer.""",
}
EMOJI = [*"😀🎉🚀🔥💯🤖🌍✨🍕🎧🐳🧠🪴📈", "👍🏽", "❤️", "👩\u200d💻", "🇫🇷", "🏔️"]
REPOSITORY = Path(__file__).parents[1]
CODE = sorted([*REPOSITORY.glob("gateway/**/*.py"), *REPOSITORY.glob("lua/**/*.lua")])
LONG = 4
"""Turns of a long chat, each of another kind."""


def _prose(language: str) -> Callable[[random.Random, int], str]:
    between = "" if language in ("Chinese", "Japanese") else " "
    sentences = SENTENCES[language].split("\n")

    def write(chance: random.Random, chars: int) -> str:
        text = ""
        while len(text) < chars:
            text += chance.choice(sentences) + (between if chance.random() < 0.85 else "\n\n")
        return text[:chars]

    return write


def _code(chance: random.Random, chars: int) -> str:
    text = ""
    while len(text) < chars:
        whole = chance.choice(CODE).read_text()
        text += whole[chance.randrange(max(1, len(whole) - chars)) :]
    return text[:chars]


def _json(chance: random.Random, chars: int) -> str:
    names = ["id", "name", "price", "tags", "created_at", "owner", "is_active", "score"]
    rows: list[dict[str, Any]] = []
    while len(rows) < 2 or len(json.dumps(rows)) < chars:
        row = {name: _value(chance) for name in chance.sample(names, 5)}
        rows.append(row)
    return json.dumps(rows)


def _value(chance: random.Random) -> Any:
    return chance.choice(
        [chance.randrange(100_000), round(chance.random() * 1000, 2), chance.random() < 0.5, None, "pending",
         f"2026-{chance.randrange(1, 13):02}-{chance.randrange(1, 29):02}T12:00:00Z", ["red", "green"]]
    )  # fmt: skip


def _emoji(chance: random.Random, chars: int) -> str:
    return "".join(chance.choices(EMOJI, k=chars // 2))


def _base64(chance: random.Random, chars: int) -> str:
    return base64.b64encode(chance.randbytes(chars * 3 // 4)).decode()


KINDS: dict[str, Callable[[random.Random, int], str]] = {
    **{language: _prose(language) for language in SENTENCES},
    "code": _code,
    "JSON": _json,
    "emoji": _emoji,
    "base64": _base64,
}
CHATS = (*KINDS, "long chat")


def messages(kind: str, chance: random.Random) -> list[dict[str, Any]]:
    """A chat of one kind, of some hundred to some thousand characters; a long one has turns of several."""
    if kind == "long chat":
        turns = [chance.choice(tuple(KINDS)) for _ in range(LONG)]
        texts = [KINDS[each](chance, int(chance.lognormvariate(6.5, 0.6))) for each in turns]
    else:
        texts = [KINDS[kind](chance, 100 + int(chance.lognormvariate(7, 0.8)))]
    roles = ["user", "assistant"] * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
