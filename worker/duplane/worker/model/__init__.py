"""The speech model in torch: audio and pictures in, decisions, text and audio out, for many slots.

Nothing here knows about gRPC, asyncio or sessions; `DuplexModel` is what the worker uses.

The released model was tuned with the reference implementation and is served by it, quirks
included. What changes the ids or the sound that the model is used to is copied, and so are the
recorded traces; what only breaks a session, or ties one to another, is done right.

| the reference ...                                     | here   | because                        |
|-------------------------------------------------------|--------|--------------------------------|
| listen_prob_scale, listen_top_k act on `<|im_end|>`   | copied | the values in use mean that    |
| repetition penalty divides negative logits too        | copied | changes every choice           |
| a unit too short leaves a lone `<unit>` row           | right  | refused untouched; windows fit |
| listen after a turn's end in one unit loses its text  | copied | the ids stay, as the model saw |
| a forced listen keeps the talker's cache of the turn  | copied | the next turn begins from it;  |
|                                                       |        | its own end clears it          |
| mel normalisation leaks into the next session's voice | right  | a session is its own affair    |
| vocoder caches are shared, 1000 frames at most        | right  | slots; sized by voice and turn |
| attention caches keep odd frames (`flow_retention`)   | copied | it is what the vocoder sounds  |
| diffusion noise drawn at start, source noise per call | right  | one table; a slot's own seed   |
| chat without streaming fails                          | right  | one way to generate            |
| chat prompts have `<|im_end|>` twice                  | copied | the model is used so           |
| chat fails when the first id ends the answer          | right  | the answer is empty            |
| `<|listen|>` is stripped from chat prompts            | right  | moves all bounds behind it     |
| frames alone first: the first audio is cut elsewhere  | right  | first audio is first audio     |
| clients set sampling only, the rest is fixed at load  | right  | every option is a session's    |
| windows fill a smaller cache before they move         | right  | units leave when room is short |
| stacked frames of long videos stand at other moments  | right  | they go with what they follow  |
| half duplex drops rows that are not whole rounds      | right  | rounds go whole                |
| after a window, the same prompt is computed again     | right  | it would be the same rows      |
"""
