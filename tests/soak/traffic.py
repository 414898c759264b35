"""The callers of a soak run: they know the right answer to everything they ask, and note whatever is not it."""

import contextlib
import random
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from barrel_inference import BarrelError, Client
from barrel_inference.results import Completion

# A request that is not answered in this time is lost. Far above anything that a restart takes.
ANSWER_S = 120.0

# What requests get when the runtime itself ends.
CUT_OFF = ("no_runtime", "model_down")


class Journal:
    """What happened, newest last; kept short, for the report of a failure."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._lock = threading.Lock()
        self._last: deque[str] = deque(maxlen=60)
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    def note(self, kind: str, text: str = "") -> None:
        """Count an event, and remember what it was."""
        with self._lock:
            self.counts[kind] += 1
            if kind not in ("answered", "cancelled"):  # too many to say what led to a failure
                self._last.append(f"{time.monotonic() - self._began_s:8.2f} s  {kind} {text}")

    def fail(self, text: str) -> None:
        """Something is not as it must be."""
        self.note("FAILURE", text)
        with self._lock:
            self.failures.append(text)

    def last(self) -> list[str]:
        """The last events."""
        with self._lock:
            return list(self._last)


@dataclass(frozen=True, slots=True)
class Question:
    """One request whose greedy answer is known."""

    model: str
    prompt: tuple[int, ...]
    tokens: int


@dataclass
class Answers:
    """The undisturbed answers."""

    by_question: dict[Question, list[int]] = field(default_factory=dict)

    def learn(self, client: Client, solo: str, question: Question) -> None:
        """Ask a model that nobody else uses, before anything is disturbed."""
        result = client.complete(solo, list(question.prompt), response_tokens=question.tokens, deadline_s=ANSWER_S)
        self.by_question[question] = result.generated


class Caller(threading.Thread):
    """Asks one question after the other until it is told to stop."""

    def __init__(self, client: Client, answers: Answers, journal: Journal, rng: random.Random) -> None:
        super().__init__(daemon=True)
        self._client = client
        self._answers = answers
        self._journal = journal
        self._rng = rng
        self._questions = sorted(answers.by_question, key=repr)
        self.stopping = threading.Event()
        self.is_ending = threading.Event()  # the runtime itself: requests may be cut off, by a word for it
        self.asks_since_s = 0.0
        self.completed: Counter[str] = Counter()

    def run(self) -> None:
        """Never raises: what goes wrong is in the journal."""
        while not self.stopping.is_set():
            question = self._rng.choice(self._questions)
            how = self._rng.choice((self._stream, self._stream, self._complete, self._cancel, self._session))
            self.asks_since_s = time.monotonic()
            try:
                how(question)
            except BarrelError as error:
                if self.is_ending.is_set() and error.code in CUT_OFF:
                    self._journal.note("cut off", error.code)
                    break
                given_up = error.code == "model_down" and not error.retryable and "times" in error.message
                if given_up:  # chance killed its model three times under it: what a deadly request gets
                    self._journal.note("given_up", f"{question.model}: {error}")
                else:
                    self._journal.fail(f"{how.__name__} at {question.model}: {error.code}: {error}")
            except Exception as error:
                self._journal.fail(f"{how.__name__} at {question.model}: {error!r}")
        self.asks_since_s = 0.0

    def _check(self, question: Question, ids: list[int], result: Completion) -> None:
        expected = self._answers.by_question[question]
        if ids != result.generated:
            self._journal.fail(f"gap or repeat at {question}: streamed {ids}, result {result.generated}")
        if result.finish_reason == "cancelled" and self.is_ending.is_set():
            expected = expected[: len(ids)]
        if result.generated != expected:
            self._journal.fail(
                f"wrong text at {question}: {result.generated} instead of {expected} ({result.cache_hit_kind} from "
                f"{result.hit_source}, resubmitted {result.resubmitted})"
            )
        self.completed[result.request_id] += 1
        self._journal.note("answered", f"{question.model} {result.cache_hit_kind} {result.resubmitted}")
        self._journal.counts["resubmitted"] += bool(result.resubmitted)
        self._journal.counts[f"hit {result.cache_hit_kind} {result.hit_source}"] += 1

    def _stream(self, question: Question) -> None:
        ids: list[int] = []
        with self._client.stream(
            question.model, list(question.prompt), response_tokens=question.tokens, deadline_s=ANSWER_S
        ) as stream:
            for event in stream:
                ids += event.token_ids
                if event.result is not None:
                    self._check(question, ids, event.result)
                    return
        self._journal.fail(f"a stream without an end at {question}")

    def _complete(self, question: Question) -> None:
        result = self._client.complete(
            question.model, list(question.prompt), response_tokens=question.tokens, deadline_s=ANSWER_S
        )
        self._check(question, result.generated, result)

    def _session(self, question: Question) -> None:
        session = f"s{self._rng.randrange(10**9)}"
        result = self._client.complete(
            question.model,
            list(question.prompt),
            response_tokens=question.tokens,
            session_id=session,
            deadline_s=ANSWER_S,
        )
        self._check(question, result.generated, result)
        with contextlib.suppress(BarrelError):  # it may have gone with its process
            self._client.end_session(question.model, session)

    def _cancel(self, question: Question) -> None:
        with self._client.stream(
            question.model, list(question.prompt), response_tokens=question.tokens, deadline_s=ANSWER_S
        ) as stream:
            ids = list(next(stream).token_ids)
            stream.cancel()
            for event in stream:
                ids += event.token_ids
        expected = self._answers.by_question[question]
        if ids != expected[: len(ids)]:
            self._journal.fail(f"wrong text before a cancel at {question}: {ids}")
        self._journal.note("cancelled", question.model)
