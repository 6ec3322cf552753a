"""Text from tokens that arrive one by one."""

from maxpipe.data.tokenizers import Tokenizer


class TextStream:
    """Decodes a growing sequence of tokens; a character may take several of them.

    Args:
      tokenizer: decodes.
      ids: tokens that come before, such as a prompt; their text is not given out.
    """

    def __init__(self, tokenizer: Tokenizer, ids: list[int]):
        self._tokenizer = tokenizer
        # Decoded together with what follows: some tokenizers drop the space that a text begins
        # with.
        self._ids = list(ids)
        self._shown = tokenizer.decode(self._ids)

    def add(self, token: int) -> str:
        """The text that is complete with `token`; empty in the middle of a character."""
        earlier, self._ids = len(self._ids), [*self._ids, token]
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        new = text[len(self._shown) :]
        # The last token alone is context enough for the next ones.
        self._ids = self._ids[earlier:]
        self._shown = self._tokenizer.decode(self._ids)
        return new

    def rest(self) -> str:
        """What is left at the end: a character that was never completed."""
        return self._tokenizer.decode(self._ids)[len(self._shown) :]
