/** Tests of the modules of the talk page that know no page: `node --test`. */

import assert from "node:assert/strict";
import { test } from "node:test";

const folder = new URL("../../../../edge/duplane/edge/pages/talk/", import.meta.url);
const { SentSound } = await import(new URL("sent.js", folder));

const SECOND = 16000; // samples

// Sound of so many seconds, whose pieces end at 200, 400, ... ms.
function sent(seconds, unitMs = 1000) {
  const sound = new SentSound(unitMs);
  for (let end = 200; end <= seconds * 1000; end += 200) sound.add(end);
  return sound;
}

const ends = (sound, count) => Array.from({ length: count }, (_, unit) => sound.endOf(unit));

// The pieces that complete a unit, by their number.
function completing(sound, count) {
  return Array.from({ length: count }, (_, at) => at).filter((at) => sound.completesUnit(at));
}

test("each unit ends with a piece", () => {
  assert.deepEqual(ends(sent(3), 4), [1000, 2000, 3000, undefined]);
  assert.deepEqual(ends(sent(2, 500), 4), [600, 1000, 1600, 2000]);
  assert.deepEqual(completing(sent(0), 10), [4, 9]);
  assert.deepEqual(completing(sent(0, 500), 10), [2, 4, 7, 9]);
});

test("units after dropped ones have later sound", () => {
  const sound = sent(6);
  sound.drop(2);
  assert.deepEqual(ends(sound, 3), [3000, 4000, 5000]);
});

test("sound that is lost shifts the units after it, and only these", () => {
  const sound = sent(10);
  assert.equal(sound.lose(2.5 * SECOND, 1.2 * SECOND), 2); // during the third unit
  assert.deepEqual(ends(sound, 5), [1000, 2000, 4200, 5200, 6200]);
  assert.equal(sound.lose(7 * SECOND, SECOND), 1);
  assert.deepEqual(ends(sound, 6), [1000, 2000, 4200, 5200, 6200, 8200]);
  assert.equal(sound.lose(9 * SECOND, 0), 0);
  assert.equal(sound.endOf(5), 8200);
});

test("sound that is lost shifts the pieces that complete units", () => {
  const sound = sent(0);
  sound.lose(0.4 * SECOND, 0.6 * SECOND);
  assert.deepEqual(completing(sound, 15), [7, 12]);
});

test("sound that was lost after the units is not theirs", () => {
  const sound = sent(5);
  sound.lose(3 * SECOND, SECOND);
  assert.deepEqual(ends(sound, 4), [1000, 2000, 3000, 5000]);
});
