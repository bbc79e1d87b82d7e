"""`shoal run`: one answer, or a chat, in the terminal, with the engine in this process."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.config import EngineConfig
from shoal.engine.errors import RequestFailedError
from shoal.engine.inputs import InputProcessor
from shoal.engine.loading import load_engine, load_text_interface, model_limits
from shoal.engine.outputs import FailedSample, OutputProcessor
from shoal.model.chat import ChatTemplateError
from shoal.model.loader import open_model
from shoal.model.registry import resolve
from shoal.model.tokenizer import InvalidTextError
from shoal.request import FinishReason, InvalidParameterError, SamplingParams
from shoal.scheduler.interface import RequestRejectedError

# What is wrong with one question, so that a chat can go on with the next.
REFUSALS = (ChatTemplateError, InvalidParameterError, InvalidTextError, RequestRejectedError)

FORGET, LEAVE = "/clear", "/exit"


@dataclass(frozen=True, slots=True)
class Conversation:
    """How to answer: the sampling parameters and the system message, if there is one."""

    params: SamplingParams
    system: str | None = None

    def messages(self) -> list[dict[str, str]]:
        """The messages before the user's first."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]


def run(config: EngineConfig, conversation: Conversation, prompt: str | None) -> None:
    """Answer `prompt`, or chat until the input ends when there is none.

    Raises:
        ModelError, ConfigError: the model can't be loaded.
        RequestRejectedError: `prompt` can't be answered.
        EngineDeadError, RequestFailedError: the engine failed.
    """
    answerer = _Answerer(config, conversation.params)
    try:
        if prompt is None:
            _chat(answerer, conversation)
        else:
            messages = [*conversation.messages(), {"role": "user", "content": prompt}]
            _show(answerer.answer(messages))
    except REFUSALS as error:
        raise RequestRejectedError(str(error)) from error
    finally:
        answerer.close()


def _chat(answerer: _Answerer, conversation: Conversation) -> None:
    """Read questions and show answers; Ctrl-C ends an answer, Ctrl-D the chat."""
    print(f"Chat with the model. {FORGET} forgets what was said, {LEAVE} or Ctrl-D leaves.")
    messages = conversation.messages()
    while (question := _read_question()) is not None:
        if question == FORGET:
            messages = conversation.messages()
        elif question:
            asked = [*messages, {"role": "user", "content": question}]
            try:
                answer = _show(answerer.answer(asked))
            except REFUSALS as error:
                print(f"shoal: {error}", file=sys.stderr)
            else:
                messages = [*asked, {"role": "assistant", "content": answer}]


def _read_question() -> str | None:
    """The next line of input; None when the user leaves."""
    try:
        question = input("> ").strip()
    except EOFError:
        print()
        return None
    return None if question == LEAVE else question


def _show(pieces: Iterator[str]) -> str:
    """Print an answer as it comes and return what has come, also when Ctrl-C cuts it short."""
    shown: list[str] = []
    try:
        for piece in pieces:
            shown.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    print()
    return "".join(shown)


class _Answerer:
    """An engine for one conversation at a time.

    Raises:
        ModelError, ConfigError: the model can't be loaded.
    """

    def __init__(self, config: EngineConfig, params: SamplingParams) -> None:
        model = open_model(resolve(config.model))
        self._text = load_text_interface(model)
        self._engine, info = load_engine(config, model)
        self._inputs = InputProcessor(model_limits(info, self._text), config)
        self._params = params
        self._request_ids = map(str, itertools.count())

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """The pieces of the answer as they come; leaving early ends the request."""
        request_id = next(self._request_ids)
        requests = self._inputs.process(
            request_id, self._encode(messages), self._params, arrival_time=time.monotonic()
        )
        outputs = OutputProcessor(self._text.tokenizer)
        outputs.add(request_id, requests)
        self._engine.add(requests)
        self._engine.end_input()
        try:
            while self._engine.has_work():
                processed = outputs.process(self._engine.step())
                self._engine.abort(processed.stopped_ids, FinishReason.STOP)
                for _, item in processed.items:
                    if isinstance(item, FailedSample):
                        raise RequestFailedError(item.error)
                    yield item.text
        finally:
            self._engine.abort(outputs.remove(requests))

    def _encode(self, messages: list[dict[str, str]]) -> list[int]:
        """The prompt; a model without a chat template continues the only message as it is."""
        template = self._text.chat_template
        tokenizer = self._text.tokenizer
        if template is not None:
            return tokenizer.encode(template.render(messages), add_special_tokens=False)
        if len(messages) > 1:
            raise InvalidParameterError(
                "messages", "the model has no chat template: it can only continue one text"
            )
        return tokenizer.encode(messages[0]["content"])
