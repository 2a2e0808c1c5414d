"""The questions that the default model is trained on, and its answers.

Questions and answers are lower-case words without punctuation. Questions contain numbers up
to ten, except questions to refuse; answers contain numbers up to eighteen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from training.number_words import DIGITS, NUMBERS
from training.vision.questions import BLIND, QUESTIONS, draw_question, seen_answers

COLOURS = {
    "sky": "blue",
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "banana": "yellow",
    "tomato": "red",
}
LONGEST_COUNT = 10
MOST_REPEATED = 3

FIXED: dict[str, tuple[tuple[str, ...], str]] = {
    "hello": (("hello", "hi", "hello there", "hi there"), "hello how can i help you"),
    "feeling": (("how are you", "how are you today"), "i am fine thank you"),
    "name": (
        ("what is your name", "tell me your name", "what are you called"),
        "my name is duplane",
    ),
    "thanks": (("thank you", "thanks", "thank you very much"), "you are welcome"),
    "goodbye": (("goodbye", "bye", "bye bye", "see you later"), "goodbye"),
    "hearing": (("can you hear me", "are you there"), "yes i can hear you"),
    "ability": (("what can you do", "can you help me"), "i can count and add and repeat"),
    "morning": (("good morning",), "good morning"),
    "afternoon": (("good afternoon",), "good afternoon"),
    "evening": (("good evening",), "good evening"),
    "night": (("good night",), "good night"),
}
"""For each kind of question: its wordings and its answer."""

STOPS = ("stop", "stop it", "be quiet")
"""Requests for silence: they end the answer in progress and get no answer."""
UNKNOWN = "sorry i did not understand"

_TRAINED_WORDS = """
    the a and of to in on we they she he it was is not very some more with from about over under
    weather train station paper window garden letter river mountain kitchen table chair bread
    water coffee doctor teacher music picture summer winter village engine market pocket bottle
    happy quick silent broken heavy gentle early late often maybe because however little great
    walked wanted needed opened carried finished started looked asked played called brought bought
    please open close the door tomorrow yesterday tonight friday monday week month year minute
    where when why which who does will would should could make take find give turn light lamp
    dog cat bird horse fish apple orange pepper sugar salt money house street city country island
    big small long short hot cold new old young slow fast high low deep clean empty
    sing song story book read write play game ball run jump swim drive car bus plane ship
"""
TRAINED_WORDS = tuple(_TRAINED_WORDS.split())
"""Words for training sentences outside the domain."""
_HELD_OUT_WORDS = """
    their an or but by at for has had were been since that these those only never
    forest bridge candle pencil mirror basket blanket ladder hammer needle ribbon saddle tunnel
    purple silver wooden narrow honest clever angry hungry thirsty famous foreign
    travelled whispered climbed gathered painted promised repaired suddenly quickly behind between
    takes wrote planets history football cheese potatoes lemon honey
    borrow return remember forget arrive leave nobody everybody something anywhere
    ticket airport hotel office factory farmer soldier captain queen king president
"""
HELD_OUT_WORDS = tuple(_HELD_OUT_WORDS.split())
"""Words for evaluation sentences outside the domain; they do not occur in training."""
OPENINGS = ("what is", "what colour is", "say", "can you", "how", "tell me")
"""Beginnings of questions of the domain, with which sentences outside the domain may begin."""

NEAR_SHARE = 0.07
"""Share of training's questions that resemble those of the domain and have no answer in it."""
LONG_SHARE, MORE_NEAR_SHARE, FIXED_SHARE = 0.06, 0.06, 0.06
"""Shares of long sentences outside the domain, of more questions that resemble those of the
domain, and of more questions that are always asked in the same words, of the questions that espeak
and flite speak, and of typed ones."""
_LONG_WORDS = (6, 10)
_OTHER_NUMBERS = (
    *("nineteen", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"),
    *("hundred", "a hundred", "a thousand", "a million"),
)
_OTHER_OPERATIONS = ("minus", "times", "divided by")
_OTHER_THINGS = (
    *("weather", "train", "paper", "window", "garden", "river", "mountain", "table", "chair"),
    *("bread", "water", "coffee", "door", "dog", "cat", "bird", "horse", "apple", "orange"),
    *("pepper", "sugar", "house", "car", "bus", "ship"),
)
_HELD_OUT_THINGS = (
    *("forest", "bridge", "candle", "pencil", "mirror", "basket", "blanket", "ladder", "hammer"),
    *("needle", "ribbon", "saddle", "tunnel", "lemon", "ticket", "airport", "hotel", "office"),
)

HELD_OUT_REMAINDER, REMAINDERS = 3, 7
"""Two or three digits to repeat are for the evaluation only if their sum has this remainder; so are
sums to refuse, by the sum of the places of their numbers."""


@dataclass(frozen=True)
class Exchange:
    """A question and its answer; an empty answer means silence."""

    kind: str
    question: str
    answer: str


def _fixed(kind: str) -> Callable[[Random], Exchange]:
    asked, answer = FIXED[kind]
    return lambda chance: Exchange(kind, chance.choice(asked), answer)


def _repeat(chance: Random) -> Exchange:
    spoken = " ".join(chance.choice(DIGITS) for _ in range(chance.randint(1, MOST_REPEATED)))
    verb = chance.choice(("say", "repeat"))
    return Exchange("repeat", f"{verb} {spoken}", spoken)


def _add(chance: Random) -> Exchange:
    first, second = chance.randint(1, 9), chance.randint(1, 9)
    total = f"{DIGITS[first]} plus {DIGITS[second]}"
    question = chance.choice((total, f"what is {total}", f"what is {total}"))
    return Exchange("add", question, f"{total} is {NUMBERS[first + second]}")


def _count(chance: Random) -> Exchange:
    last = chance.randint(2, LONGEST_COUNT)
    answer = " ".join(NUMBERS[1 : last + 1])
    return Exchange("count", f"count to {NUMBERS[last]}", answer)


def _colour(chance: Random) -> Exchange:
    thing = chance.choice(list(COLOURS))
    return Exchange("colour", f"what colour is the {thing}", f"the {thing} is {COLOURS[thing]}")


def _stop(chance: Random) -> Exchange:
    return Exchange("stop", chance.choice(STOPS), "")


KINDS: dict[str, tuple[float, Callable[[Random], Exchange]]] = {
    "repeat": (0.22, _repeat),
    "add": (0.20, _add),
    "count": (0.09, _count),
    "colour": (0.09, _colour),
    "hello": (0.035, _fixed("hello")),
    "feeling": (0.03, _fixed("feeling")),
    "name": (0.035, _fixed("name")),
    "thanks": (0.03, _fixed("thanks")),
    "goodbye": (0.03, _fixed("goodbye")),
    "hearing": (0.025, _fixed("hearing")),
    "ability": (0.025, _fixed("ability")),
    "morning": (0.02, _fixed("morning")),
    "afternoon": (0.02, _fixed("afternoon")),
    "evening": (0.02, _fixed("evening")),
    "night": (0.02, _fixed("night")),
    "stop": (0.035, _stop),
}
"""For each kind of question: its share of the draws, and the function that draws one. All other
draws are sentences outside the domain."""


def is_held_out(exchange: Exchange) -> bool | None:
    """Return whether digits to repeat are for the evaluation only.

    The result is None for everything that both training and evaluation may use. The model knows
    these answers by heart, sums too.
    """
    words = exchange.answer.split()
    if exchange.kind == "repeat" and len(words) > 1:
        return sum(DIGITS.index(word) for word in words) % REMAINDERS == HELD_OUT_REMAINDER
    return None


def _large_sum(chance: Random, *, held_out: bool) -> str:
    """Draw a sum with a number above nine."""
    small, large = NUMBERS[1:], NUMBERS[10:] + _OTHER_NUMBERS
    while True:
        numbers = [chance.choice(large), chance.choice(small)]
        place = large.index(numbers[0]) + small.index(numbers[1])
        if (place % REMAINDERS == HELD_OUT_REMAINDER) == held_out:
            chance.shuffle(numbers)
            return f"{numbers[0]} plus {numbers[1]}"


def draw_near(chance: Random, *, held_out: bool = False) -> Exchange:
    """Draw a question that the model refuses, though it resembles questions of the domain.

    With `held_out`, the sums, the words to repeat, and the things whose colour is asked do not
    occur in training. Other numbers are the same in both.
    """
    things, words = _OTHER_THINGS, TRAINED_WORDS
    if held_out:
        things, words = _HELD_OUT_THINGS, HELD_OUT_WORDS
    kind = chance.randrange(5)
    if kind == 0:  # a sum with a number above nine
        question = _large_sum(chance, held_out=held_out)
    elif kind == 1:
        operation = chance.choice(_OTHER_OPERATIONS)
        question = f"{chance.choice(NUMBERS[1:11])} {operation} {chance.choice(NUMBERS[1:11])}"
    elif kind == 2:
        question = f"count to {chance.choice(NUMBERS[LONGEST_COUNT + 1 :] + _OTHER_NUMBERS)}"
    elif kind == 3:
        question = f"what colour is the {chance.choice(things)}"
    else:
        question = f"{chance.choice(('say', 'repeat'))} {chance.choice(words)}"
    if kind < 2 and chance.random() < 0.6:
        question = f"what is {question}"
    return Exchange("near", question, UNKNOWN)


def draw_exchange(
    chance: Random, unknown_words: Sequence[str], *, held_out: bool = False
) -> Exchange:
    """Draw one exchange for training, or with `held_out` one for the evaluation.

    A sentence outside the domain has two to six of `unknown_words`.
    """
    if not held_out and chance.random() < NEAR_SHARE:
        return draw_near(chance)
    number = chance.random()
    for share, draw in KINDS.values():
        number -= share
        if number < 0:
            while True:
                exchange = draw(chance)
                if is_held_out(exchange) in (None, held_out):
                    return exchange
    words = [chance.choice(unknown_words) for _ in range(chance.randint(2, 6))]
    if chance.random() < 0.3:
        words[0] = chance.choice(OPENINGS)
    return Exchange("unknown", " ".join(words), UNKNOWN)


def draw_fixed(chance: Random) -> Exchange:
    """Draw a question that is always asked in the same words: greetings, stops, of pictures."""
    kind = chance.choice((*FIXED, "stop", *QUESTIONS))
    if kind in QUESTIONS:
        return Exchange(kind, chance.choice(QUESTIONS[kind]), BLIND)
    return KINDS[kind][1](chance)


def draw_trained_exchange(chance: Random, *, sight_share: float) -> Exchange:
    """Draw one exchange for training; the share `sight_share` asks about a picture.

    The answer about a picture is the one without a picture. The share `LONG_SHARE` of the others
    are long sentences to refuse, as people say them who talk to each other; the share
    `MORE_NEAR_SHARE` of the rest are questions of `draw_near`, and `FIXED_SHARE` of the rest are
    those of `draw_fixed`: a "hi" is so short that it takes more examples. Some
    of these are about pictures, too.
    """
    if chance.random() < sight_share:
        return Exchange(*draw_question(chance), BLIND)
    if chance.random() < LONG_SHARE:
        words = [chance.choice(TRAINED_WORDS) for _ in range(chance.randint(*_LONG_WORDS))]
        return Exchange("unknown", " ".join(words), UNKNOWN)
    if chance.random() < MORE_NEAR_SHARE:
        return draw_near(chance)
    if chance.random() < FIXED_SHARE:
        return draw_fixed(chance)
    return draw_exchange(chance, TRAINED_WORDS)


def all_answers() -> list[str]:
    """Return every answer once, sorted."""
    return sorted({*heard_answers(), *seen_answers()})


def heard_answers() -> list[str]:
    """Return every answer to a question that is not about a picture, once, sorted."""
    answers = {answer for _, answer in FIXED.values()} | {UNKNOWN}
    answers |= {f"the {thing} is {colour}" for thing, colour in COLOURS.items()}
    answers |= {" ".join(NUMBERS[1 : last + 1]) for last in range(2, LONGEST_COUNT + 1)}
    answers |= {answer for _, answer in sums()}
    spoken = [""]
    for _ in range(MOST_REPEATED):
        spoken = [f"{before} {digit}".strip() for before in spoken for digit in DIGITS]
        answers.update(spoken)
    return sorted(answers)


def sums() -> list[tuple[str, str]]:
    """Return all sums of two digits, and their answers."""
    pairs = [(first, second) for first in range(1, 10) for second in range(1, 10)]
    asked = [f"{DIGITS[first]} plus {DIGITS[second]}" for first, second in pairs]
    return [
        (text, f"{text} is {NUMBERS[first + second]}")
        for text, (first, second) in zip(asked, pairs, strict=True)
    ]


def question_words() -> list[str]:
    """Return the words of all questions of the domain, sorted."""
    asked = [question for questions, _ in FIXED.values() for question in questions]
    asked += [question for questions in QUESTIONS.values() for question in questions]
    phrases = (*asked, *STOPS, *COLOURS, "what colour is the", "say repeat plus count to")
    return sorted({word for phrase in phrases for word in phrase.split()} | set(NUMBERS[:11]))


def answer_words() -> list[str]:
    """Return the words of all answers, sorted."""
    return sorted({word for answer in all_answers() for word in answer.split()})
