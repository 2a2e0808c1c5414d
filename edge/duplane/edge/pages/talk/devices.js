// Microphone, camera, and the lock that keeps the screen on.

const LONG_SIDE = 448; // pixels of a picture for the model
const QUALITY = 0.7;
const SENTENCES = {
  NotAllowedError: "The browser may not use the microphone: allow it in the bar of the address, then start again.",
  NotFoundError: "There is no microphone: connect one, then start again.",
  NotReadableError: "The microphone cannot be used: maybe another program has it.",
  OverconstrainedError: "The chosen microphone is gone: choose another one in the settings.",
};

/** Thrown if a device cannot be used. The message is a sentence for the person. */
export class DeviceError extends Error {}

/** Return the stream of a microphone. Throws DeviceError. */
export async function openMicrophone({ deviceId, echo, noise, gain }) {
  return open({
    audio: {
      ...(deviceId && { deviceId: { exact: deviceId } }),
      echoCancellation: echo,
      noiseSuppression: noise,
      autoGainControl: gain,
      channelCount: 1,
    },
  });
}

async function open(constraints) {
  try {
    return await navigator.mediaDevices.getUserMedia(constraints);
  } catch (error) {
    const sentence = SENTENCES[error.name] ?? `The device cannot be used: ${error.message}`;
    throw new DeviceError(constraints.video ? sentence.replaceAll("microphone", "camera") : sentence);
  }
}

/** A camera whose pictures go to the model. */
export class Camera {
  #video;
  #stream = null;
  #isClosed = false;

  /** `video` is the element that shows the camera. */
  constructor(video) {
    this.#video = video;
  }

  /** Throws DeviceError. */
  async open(deviceId) {
    const wanted = deviceId ? { deviceId: { exact: deviceId } } : { facingMode: "user" };
    this.#stream = await open({ video: { ...wanted, width: { ideal: 640 } } });
    if (this.#isClosed) {
      this.close(); // the person has left before the browser's question was answered
      return;
    }
    this.#video.srcObject = this.#stream;
    this.#video.hidden = false;
    await this.#video.play();
  }

  /** Return a JPEG of what the camera sees; null if it sees nothing yet. */
  async picture() {
    const { videoWidth: width, videoHeight: height } = this.#video;
    if (!this.#stream || !width) return null;
    const scale = Math.min(1, LONG_SIDE / Math.max(width, height));
    const canvas = new OffscreenCanvas(Math.round(width * scale), Math.round(height * scale));
    canvas.getContext("2d").drawImage(this.#video, 0, 0, canvas.width, canvas.height);
    const blob = await canvas.convertToBlob({ type: "image/jpeg", quality: QUALITY });
    return new Uint8Array(await blob.arrayBuffer());
  }

  close() {
    this.#isClosed = true;
    stop(this.#stream);
    this.#stream = null;
    this.#video.srcObject = null;
    this.#video.hidden = true;
  }
}

/** Let the devices of a stream go. */
export function stop(stream) {
  for (const track of stream?.getTracks() ?? []) track.stop();
}

/** Keeps the screen on, as far as the browser can. */
export class WakeLock {
  #lock = null;
  #isWanted = false;
  #again = () => {
    if (document.visibilityState === "visible") this.#request(); // a hidden page loses it
  };

  hold() {
    this.#isWanted = true;
    document.addEventListener("visibilitychange", this.#again);
    this.#request();
  }

  async #request() {
    try {
      const lock = await navigator.wakeLock?.request("screen");
      if (this.#isWanted) this.#lock = lock;
      else await lock?.release();
    } catch {
      // The battery is low, or the page is hidden: the screen goes off as usual.
    }
  }

  release() {
    this.#isWanted = false;
    document.removeEventListener("visibilitychange", this.#again);
    this.#lock?.release();
    this.#lock = null;
  }
}
