"""The speech model in torch: audio and pictures in, decisions, text and audio out, for many slots.

This package does not depend on gRPC, asyncio or sessions; the worker uses `DuplexModel`.

In this package, a *row* is one embedding in the input of a decoder (the LLM or the talker), and its
keys and values in the decoder's cache. An *id* is the number of a token. A *tile* is a scaled
picture or one slice of it.

The *reference* is the implementation OpenBMB/MiniCPM-o-Demo at commit 28b60cf. The released model
was tuned with the quirks of this implementation. A quirk that changes the ids or the sound is
copied, so that the output matches the recorded traces. A quirk that only breaks a session, or makes
one session depend on another, is fixed.

| the reference ...                                     | here   | reason, or behaviour here     |
|-------------------------------------------------------|--------|-------------------------------|
| applies the listen options to `<|im_end|>`            | copied | settings are tuned for it     |
| divides negative logits by the repetition penalty too | copied | it affects every choice       |
| feeds `<unit>` for a unit that is then too short      | fixed  | the context stays unchanged   |
| drops the text of a unit that ends a turn and listens | copied | the ids stay in the context   |
| keeps the talker's cache after a forced listen        | copied | the next turn continues it    |
| lets mel normalisation leak into the next session     | fixed  | sessions are independent      |
| shares vocoder caches of at most 1000 frames          | fixed  | each slot has its own caches  |
| begins a turn with 280 ms of silence (see below)      | copied | it is in the recorded sound   |
| keeps unexpected frames in caches (see `flow_cache`)  | copied | they determine the sound      |
| draws diffusion noise at start, source noise per call | fixed  | one table; a seed per slot    |
| fails in a chat without streaming                     | fixed  | every chat is streamed        |
| repeats `<|im_end|>` in chat prompts                  | copied | the model is tuned for it     |
| fails if the first id ends a chat's answer            | fixed  | the answer is empty           |
| removes `<|listen|>` from chat prompts                | fixed  | removal shifts embeddings     |
| cuts the first audio differently after frames         | fixed  | frames do not affect audio    |
| sets all options but those of sampling once, at load  | fixed  | each session sets its options |
| lets a context window exceed a smaller cache          | fixed  | more units are dropped then   |
| stacks frames of unrelated moments in long videos     | fixed  | each scene has its own frames |
| drops parts of exchanges in half duplex               | fixed  | exchanges are dropped whole   |
| recomputes the same prompt when a window drops units  | fixed  | the result would be equal     |

The first chunk of a turn begins with 160 ms of zeros, because HiFT holds back its last 160 ms for
the cross-fade, and then with three tokens of silence (120 ms). The vocoder of the default model has
no cross-fade, so its turns begin with the 120 ms alone.
"""
