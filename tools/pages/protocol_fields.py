"""The fields of every event of the four dialects: whether each is required, its type, its meaning.

A test compares the events with the public specifications in `tests/specifications`, and the
required fields with the events that the dialects render.
"""

from __future__ import annotations

from collections.abc import Mapping

# Dialect -> event -> the paths of the event's required fields, and of its optional fields.
Events = Mapping[str, Mapping[str, tuple[str, str]]]

CLIENT: Events = {
    "A": {
        "session.update": (
            "session session.instructions",
            ("session.ref_audio session.tts_ref_audio session.max_slice_nums session.voice_config"),
        ),
        "input_audio_buffer.append": ("audio", ("force_listen video_frames max_slice_nums")),
        "session.close": ("", "reason"),
    },
    "B": {
        "session.init": (
            "payload",
            (
                "payload.system_prompt payload.instructions payload.config "
                "payload.duplex payload.config.length_penalty "
                "payload.length_penalty payload.seed payload.use_tts "
                "payload.max_slice_nums payload.ref_audio_path payload.defaults "
                "payload.voice payload.voice.ref_audio_base64 "
                "payload.voice.tts_ref_audio_base64 payload.voice.ref_audio "
                "payload.voice.tts_ref_audio payload.ref_audio_base64 "
                "payload.tts_ref_audio_base64 payload.ref_audio "
                "payload.tts_ref_audio"
            ),
        ),
        "input.append": (
            "input",
            (
                "input.audio input.audio_base64 input.audio_data input.audio.data "
                "input.audio.base64 input.video_frames input.frame_base64_list "
                "input.frames input.frames[].data input.frames[].base64 "
                "input.force_listen input.max_slice_nums input.hints "
                "input.hints.force_listen input.hints.max_slice_nums "
                "input.input_id input.response_id input.messages "
                "input.messages[].role input.messages[].content "
                "input.messages[].content[].type input.messages[].content[].text "
                "input.messages[].content[].data input.streaming input.generation "
                "input.generation.max_new_tokens input.generation.length_penalty "
                "input.generation.do_sample input.image.max_slice_nums input.tts "
                "input.tts.enabled input.tts.ref_audio_data "
                "input.use_tts_template input.tools input.omni_mode "
                "input.enable_thinking"
            ),
        ),
        "session.close": ("", "reason"),
    },
    "C": {
        "prepare": (
            "",
            (
                "system_prompt ref_audio_path ref_audio_base64 "
                "tts_ref_audio_base64 config config.max_slice_nums "
                "deferred_finalize max_slice_nums"
            ),
        ),
        "audio_chunk": ("audio_base64", ("frame_base64_list force_listen max_slice_nums")),
        "pause": ("", "timeout"),
        "resume": ("", ""),
        "interrupt": ("", ""),
        "stop": ("", ""),
        "client_diagnostic": ("", ""),
    },
    "D": {
        "request": (
            ("messages messages[].role messages[].content"),
            (
                "messages[].content[].type messages[].content[].text "
                "messages[].content[].data messages[].content[].sample_rate "
                "messages[].content[].stack_frames streaming generation "
                "generation.max_new_tokens generation.temperature "
                "generation.top_p generation.length_penalty tts tts.enabled "
                "tts.mode tts.ref_audio_path tts.ref_audio_data tts.language "
                "image image.max_slice_nums image.use_image_id omni_mode "
                "enable_thinking generation.top_k generation.repetition_penalty "
                "generation.do_sample use_tts_template reset_context"
            ),
        ),
    },
}
SERVER: Events = {
    "A": {
        "session.queued": (("position estimated_wait_s ticket_id queue_length"), ""),
        "session.queue_update": (("position estimated_wait_s ticket_id queue_length"), ""),
        "session.queue_done": ("", ""),
        "session.created": (
            "session_id prompt_length",
            ("recording_session_id ignored_init_fields"),
        ),
        "response.listen": (
            "kv_cache_length",
            ("metrics metrics.dropped_units metrics.dropped_frames end_of_turn"),
        ),
        "response.output_audio.delta": (
            ("text audio end_of_turn kv_cache_length"),
            ("metrics metrics.dropped_units metrics.dropped_frames"),
        ),
        "session.closed": ("reason", ""),
        "error": (("error error.code error.message error.type"), ""),
    },
    "B": {
        "session.queued": (("position estimated_wait_s ticket_id queue_length"), ""),
        "session.queue_update": (("position estimated_wait_s ticket_id queue_length"), ""),
        "session.queue_done": ("", ""),
        "session.created": (
            ("session_id server_send_ts mode metrics metrics.kv_cache_length prompt_length usage"),
            ("recording_session_id ignored_init_fields"),
        ),
        "response.output.delta": (
            ("session_id server_send_ts kind metrics"),
            (
                "response_id input_id text audio chunk_index chunk_usage usage "
                "metrics.backend metrics.kv_cache_length metrics.prefill_ms "
                "metrics.generate_ms metrics.wall_clock_ms metrics.cost_llm_ms "
                "metrics.cost_tts_prep_ms metrics.cost_tts_ms "
                "metrics.cost_token2wav_ms metrics.n_tokens metrics.n_tts_tokens "
                "metrics.vision_slices metrics.vision_tokens "
                "metrics.dropped_units metrics.dropped_frames"
            ),
        ),
        "response.done": (
            ("session_id server_send_ts response_id text reason metrics usage"),
            (
                "input_id audio finish_reason ignored_fields metrics.backend "
                "metrics.kv_cache_length metrics.n_tokens metrics.n_tts_tokens"
            ),
        ),
        "session.closed": (
            ("session_id server_send_ts reason usage"),
            "diagnostic diagnostic.message",
        ),
        "error": (
            ("session_id server_send_ts error error.code error.message error.type"),
            "input_id",
        ),
    },
    "C": {
        "queued": (("position estimated_wait_s ticket_id queue_length"), ""),
        "queue_update": (("position estimated_wait_s ticket_id queue_length"), ""),
        "queue_done": ("", ""),
        "prepared": ("prompt_length", ("recording_session_id ignored_init_fields")),
        "result": (
            (
                "is_listen text audio_data end_of_turn current_time cost_llm_ms "
                "cost_tts_prep_ms cost_tts_ms cost_token2wav_ms cost_all_ms "
                "n_tokens n_tts_tokens server_send_ts wall_clock_ms "
                "kv_cache_length vision_slices vision_tokens"
            ),
            "dropped_units dropped_frames",
        ),
        "paused": ("timeout", ""),
        "resumed": ("", ""),
        "interrupted": ("", ""),
        "stopped": ("", ""),
        "timeout": ("reason", ""),
        "error": ("error", ""),
    },
    "D": {
        "queued": (("position estimated_wait_s ticket_id queue_length"), ""),
        "queue_update": (("position estimated_wait_s ticket_id queue_length"), ""),
        "queue_done": ("", ""),
        "prefill_done": ("input_tokens", "ignored_fields"),
        "chunk": ("text_delta audio_data", ""),
        "done": (("text generated_tokens input_tokens audio_data"), "recording_session_id"),
        "error": ("error", ""),
    },
}

_PCM_IN = "base64 of float32 samples, little endian, mono, 16 kHz; or of a WAV file"
_PCM_OUT = "base64 of float32 samples, little endian, mono, 24 kHz"
_VOICE = ("string", f"a reference voice: {_PCM_IN}")
_PICTURES = ("list of strings", "base64 of JPEG, PNG, WEBP, GIF or BMP files, oldest first")
_MS = "milliseconds"
_NO_EFFECT = "has no effect; its path is reported among the ignored fields"

# Key -> type and meaning. The key is the last part of a field's path. If a field has another
# meaning in one event, the key is `DIALECT.event.path`.
MEANINGS: Mapping[str, tuple[str, str]] = {
    "audio": ("string", _PCM_IN),
    "audio_base64": ("string", _PCM_IN),
    "audio_data": ("string or null", _PCM_OUT),
    "B.input.append.input.audio_data": ("string", "another name of `audio`"),
    "B.input.append.input.audio_base64": ("string", "another name of `audio`"),
    "A.response.output_audio.delta.audio": ("string", _PCM_OUT),
    "B.response.output.delta.audio": ("string", f"with kind `audio`: {_PCM_OUT}"),
    "B.response.done.audio": ("string", f"the speech of an answer without streaming: {_PCM_OUT}"),
    "D.done.audio_data": (
        "string or null",
        f"the speech of an answer without streaming, else null: {_PCM_OUT}",
    ),
    "backend": ("string", "name of the server"),
    "base64": ("string", "another name of `data`"),
    "chunk_index": ("integer", "number of the unit, from 0; only in the first event of a unit"),
    "chunk_usage": ("object", "tokens of the unit, with the fields of `usage`"),
    "code": ("string", "an error code, see below"),
    "config": ("object", "settings of the model, see below"),
    "content": ("string or list of objects", "the text, or the parts of the message"),
    "cost_all_ms": ("number", f"{_MS} of the unit"),
    "cost_llm_ms": ("number", f"{_MS} of decoding"),
    "cost_token2wav_ms": ("number", f"{_MS} of the vocoder"),
    "cost_tts_ms": ("number", f"{_MS} of the talker"),
    "cost_tts_prep_ms": ("number", "always 0"),
    "current_time": ("integer", "number of the result, from 1"),
    "data": ("string", "base64 of a picture, sound or video file, or of samples"),
    "defaults": ("object", "fields of `payload`; each is used if `payload` lacks it"),
    "deferred_finalize": ("any", _NO_EFFECT),
    "diagnostic": ("object", "why the server ended the session"),
    "do_sample": ("boolean", "false decodes greedily; default true"),
    "dropped_frames": ("integer", "pictures dropped because a unit had too many"),
    "dropped_units": ("integer", "units dropped since the last reply, because newer ones arrived"),
    "duplex": ("object", "another name of `config`"),
    "enable_thinking": ("boolean", "true if the model may think before it answers; default false"),
    "enabled": ("boolean", "true if the answer is spoken"),
    "end_of_turn": ("boolean", "true if the model's turn ends with this unit"),
    "error": ("object", "what is wrong"),
    "C.error.error": ("string", "what is wrong"),
    "D.error.error": ("string", "what is wrong"),
    "estimated_wait_s": ("number", "seconds until a slot is expected; 0 if unknown"),
    "finish_reason": ("string", "`length` or `context_full`, if the answer was cut off"),
    "force_listen": ("boolean", "true makes the model listen to this unit, which ends its turn"),
    "frame_base64_list": _PICTURES,
    "frames": ("list of strings or objects", "another name of `video_frames`"),
    "generate_ms": ("number", f"{_MS} of decoding, talker and vocoder"),
    "generated_tokens": ("integer", "tokens of the text"),
    "generation": ("object", "how the answer is generated"),
    "hints": ("object", "`force_listen` and `max_slice_nums`; each is used if `input` lacks it"),
    "ignored_fields": ("list of strings", "paths of the fields of the request that had no effect"),
    "ignored_init_fields": ("list of strings", "paths of the settings that have no effect"),
    "image": ("object", "how pictures are read"),
    "input": ("object", "one append, or one turn of chat"),
    "input_id": ("string", "an id that the client chooses; the reply repeats it"),
    "input_token_details": ("object", "`input_tokens` by kind"),
    "input_tokens": ("integer", "tokens of the prompt"),
    "instructions": ("string", "the system prompt; must not be empty"),
    "B.session.init.payload.instructions": ("string", "another name of `system_prompt`"),
    "is_listen": ("boolean", "true if the model listened; then `audio_data` is null"),
    "kind": ("string", "`listen`, `text` or `audio`"),
    "kv_cache_length": ("integer", "tokens in the context"),
    "language": ("string", _NO_EFFECT),
    "length_penalty": ("number", "0.1 to 5; above 1 the model speaks longer"),
    "max_new_tokens": ("integer", "largest number of text tokens"),
    "max_slice_nums": ("integer, 1 to 9", "largest number of slices per picture; default 1"),
    "message": ("string", "what is wrong, with the path of the invalid field"),
    "messages": ("list of objects", "the whole history, oldest first"),
    "metrics": ("object", "measurements of the unit"),
    "mode": ("string", "`full_duplex` or `turn_based`"),
    "D.request.tts.mode": (
        "string",
        "`default`, or `audio_assistant`, `omni`, `audio_roleplay` or `voice_cloning`, which have"
        " no effect",
    ),
    "n_tokens": ("integer", "tokens of the text"),
    "n_tts_tokens": ("integer", "tokens of the speech"),
    "omni_mode": ("boolean", "true pairs the sound and pictures of a video; default false"),
    "output_tokens": ("integer", "tokens of the model's text and speech"),
    "text_tokens": ("integer", "tokens of text"),
    "audio_tokens": ("integer", "tokens of sound"),
    "output_token_details": ("object", "`output_tokens` by kind"),
    "payload": ("object", "the settings; may be empty"),
    "position": ("integer", "place in the queue, from 1"),
    "prefill_ms": ("number", f"{_MS} of the encoders and of prefill"),
    "prompt_length": ("integer", "tokens of the prompt"),
    "queue_length": ("integer", "clients in the queue"),
    "reason": ("string", "why the session ends"),
    "B.response.done.reason": ("string", "always `turn_end`"),
    "recording_session_id": ("string", "id of the recording, if the session is recorded"),
    "ref_audio": _VOICE,
    "ref_audio_base64": _VOICE,
    "ref_audio_data": _VOICE,
    "ref_audio_path": ("string", _NO_EFFECT),
    "repetition_penalty": ("number", "0.1 to 10"),
    "reset_context": ("any", _NO_EFFECT),
    "response_id": ("string", "id of the model's turn"),
    "B.input.append.input.response_id": ("string", "an id that the client gives the turn"),
    "role": ("string", "`system`, `user` or `assistant`"),
    "sample_rate": ("integer", "Hz of raw samples; default 16000"),
    "seed": ("integer", "makes sampling repeatable"),
    "server_send_ts": ("number", "Unix time in seconds at which the event was sent"),
    "session": ("object", "the settings"),
    "session_id": ("string", "id of the session"),
    "stack_frames": ("integer, 1 to 10", "pictures per second of a video; default 1"),
    "streaming": ("boolean", "true if the answer is sent in parts; default true"),
    "system_prompt": ("string", "the system prompt"),
    "temperature": ("number, 0 to 2", "temperature of sampling"),
    "text": ("string", "what the model says"),
    "B.input.append.input.messages[].content[].text": ("string", "the text of the part"),
    "D.request.messages[].content[].text": ("string", "the text of the part"),
    "text_delta": ("string", "the next part of the answer's text; may be empty"),
    "ticket_id": ("string", "id of the ticket in the queue"),
    "timeout": ("number", "seconds after which a pause ends the session; default 60"),
    "tools": ("any", _NO_EFFECT),
    "top_k": ("integer", "samples only from this many most likely tokens; 0 is off"),
    "top_p": ("number, 0 to 1", "samples only from the most likely tokens with this total share"),
    "total_tokens": ("integer", "`input_tokens` and `output_tokens`"),
    "tts": ("object", "how the answer is spoken"),
    "tts_ref_audio": ("string", f"the voice to speak with: {_PCM_IN}"),
    "tts_ref_audio_base64": ("string", f"the voice to speak with: {_PCM_IN}"),
    "type": ("string", "`client_error` or `server_error`"),
    "B.input.append.input.messages[].content[].type": (
        "string",
        "`text`, `image`, `audio` or `video`",
    ),
    "D.request.messages[].content[].type": ("string", "`text`, `image`, `audio` or `video`"),
    "usage": ("object", "tokens used so far in the session, or in the turn of a chat"),
    "use_image_id": ("boolean", "true if the prompt numbers the pictures"),
    "use_tts": ("boolean", "true if the model speaks; default true"),
    "use_tts_template": ("boolean", "true if the prompt asks for speech"),
    "video_frames": _PICTURES,
    "vision_slices": ("integer", "slices of the unit's pictures"),
    "vision_tokens": ("integer", "tokens of the unit's pictures"),
    "voice": ("object", "the voices"),
    "voice_config": ("object", "settings of the model, see below"),
    "wall_clock_ms": ("number", f"{_MS} of the unit"),
}

# The fields of `usage` and `chunk_usage` in B.
USAGE = (
    "total_tokens",
    "input_tokens",
    "input_token_details.text_tokens",
    "input_token_details.audio_tokens",
    "input_token_details.vision_tokens",
    "output_tokens",
    "output_token_details.text_tokens",
    "output_token_details.audio_tokens",
)


def meaning(dialect: str, event: str, path: str) -> tuple[str, str]:
    """Return type and meaning of one field. Raises KeyError if it is not described."""
    special = MEANINGS.get(f"{dialect}.{event}.{path}")
    return special or MEANINGS[path.replace("[]", "").rpartition(".")[2]]


def client_fields(dialect: str) -> Mapping[str, tuple[str, str]]:
    """Return the fields of the events that clients of a dialect send."""
    return CLIENT[dialect[0]]


def server_fields(dialect: str) -> Mapping[str, tuple[str, str]]:
    """Return the fields of the events that the edge sends in a dialect."""
    return SERVER[dialect[0]]
