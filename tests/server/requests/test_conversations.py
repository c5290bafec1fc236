"""Requests with a conversation, whatever their API: each translates all of its fields."""

import pytest

from headwater.server.requests.chat import ConversationRequest


class WithoutTools(ConversationRequest):
    """Request whose tools are not translated."""

    def chat_messages(self):
        return []

    def chat_choice(self):
        return None

    def chat_format(self):
        return None


def test_request_that_does_not_translate_all_fields_cannot_be_made():
    with pytest.raises(TypeError, match=r"abstract.*chat_tools"):
        WithoutTools.model_validate({})
