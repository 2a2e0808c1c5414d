import assert from "node:assert/strict";
import { test } from "node:test";
import { Resampler, encodedSound, fromBase64, samplesOf } from "../sound.js";

const tone = (rate, hertz, seconds = 0.25) =>
  Float32Array.from({ length: rate * seconds }, (_, at) => Math.sin((2 * Math.PI * hertz * at) / rate));
const largest = (samples) => samples.reduce((most, each) => Math.max(most, Math.abs(each)), 0);
const middle = (samples) => samples.subarray(100, -100); // at the edges the filter sees silence

for (const rate of [8000, 22050, 44100, 48000]) {
  test(`a tone at ${rate} Hz keeps its frequency and level`, () => {
    const made = new Resampler(rate).add(tone(rate, 440));
    const exact = tone(16000, 440, 0.3);
    assert.ok(made.length > 3900);
    assert.ok(largest(middle(made.map((sample, at) => sample - exact[at]))) < 1e-3);
  });
}

test("sound above the new rate is removed", () => {
  assert.ok(largest(middle(new Resampler(48000).add(tone(48000, 10000)))) < 1e-4);
});

for (const to of [16000, 44100, 48000]) {
  test(`sound at 24 kHz becomes ${to} Hz, to its last sample`, () => {
    const resampler = new Resampler(24000, to);
    const made = Float32Array.from([...resampler.add(tone(24000, 440)), ...resampler.tail()]);
    assert.equal(made.length, to / 4);
    const exact = tone(to, 440);
    assert.ok(largest(middle(made.map((sample, at) => sample - exact[at]))) < 1e-3);
  });
}

test("sound that needs no other rate has no tail", () => {
  assert.equal(new Resampler(24000, 24000).tail().length, 0);
});

test("pieces join without a click", () => {
  const sound = tone(44100, 1000, 0.1);
  const stream = new Resampler(44100);
  const parts = [sound.subarray(0, 1), sound.subarray(1, 8), sound.subarray(8)];
  const made = parts.flatMap((part) => [...stream.add(part)]);
  assert.deepEqual(made, [...new Resampler(44100).add(sound)]);
});

test("other rates and other sound are refused", () => {
  for (const rate of [0, 7999, 192001, 16000.5]) assert.throws(() => new Resampler(rate), RangeError);
  assert.throws(() => samplesOf([0.5]), TypeError);
  assert.throws(() => samplesOf(Float32Array.of(NaN)), RangeError);
  assert.deepEqual(samplesOf(Int16Array.of(16384, -32768)), Float32Array.of(0.5, -1));
});

test("int16 is a WAV file, and is clipped", () => {
  const bytes = fromBase64(encodedSound(Float32Array.of(0.5, -1, 2), "int16"));
  assert.equal(String.fromCharCode(...bytes.subarray(0, 4), ...bytes.subarray(8, 16)), "RIFFWAVEfmt ");
  assert.deepEqual([...new Int16Array(bytes.buffer, 44)], [16384, -32768, 32767]);
});

test("float32 is exact", () => {
  const sound = Float32Array.of(0.1, -0.2, 3).subarray(1);
  assert.deepEqual(new Float32Array(fromBase64(encodedSound(sound, "float32")).buffer), sound);
});
