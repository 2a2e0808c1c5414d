/** The rate of the sound that the server gets, in Hz. */
export const INPUT_RATE: 16000;
/** The rate of the sound that the server sends, in Hz. */
export const OUTPUT_RATE: 24000;

/**
 * A place in the queue for a slot, from 1. `estimatedWaitS` is null if it is unknown. Then `reason`
 * may say why.
 */
export interface QueuePlace {
  position: number;
  queueLength: number;
  estimatedWaitS: number | null;
  ticketId: string;
  reason: string;
}

/**
 * What the model does in one unit, or in B a part of it: text, audio and the end of a turn. The
 * parts of a unit have the same `index`. `audio` is float32 at 24 kHz. If `interrupted`, drop what
 * is not played yet. `droppedUnits` counts units of input that the model never got. `inputId` is the
 * name that `send` gave to the sound, in B. `metrics` are further measurements of the server.
 */
export interface Output {
  index: number;
  speaks: boolean;
  text: string;
  audio: Float32Array;
  endOfTurn: boolean;
  interrupted: boolean;
  droppedUnits: number;
  contextTokens: number;
  listenProbability: number | null;
  turnId: string | null;
  inputId: string | null;
  /** In a resumable session, the number of the unit, and that of the event among those of the unit. */
  unit: number | null;
  part: number | null;
  /** The client missed this event while it had no connection. */
  replayed: boolean;
  metrics: Record<string, unknown>;
}

/**
 * A return to the session on another socket. The server had no socket for `gapS`, the client for
 * `awayS`; `tookS` of it are from the last attempt to the server's answer. `lostSamples` of the input
 * are lost, because they were older than 10 s. A client that `wasAsked` left a server that shuts down.
 */
export interface Return {
  gapS: number;
  awayS: number;
  tookS: number;
  attempts: number;
  lostSamples: number;
  wasAsked: boolean;
}

/** An event of the protocol, as the server sent it. */
export type Event = { type: string; [field: string]: unknown };

export interface SessionOptions {
  /** Default: "B". */
  dialect?: "A" | "B";
  /** Default: "audio". */
  mode?: "audio" | "video";
  instructions?: string;
  /** A WAV file with the voice to speak with. */
  voice?: Uint8Array;
  /** The same seed and sound give the same answers. B only. */
  seed?: number;
  /** Settings of the model, such as `length_penalty`. */
  options?: Record<string, unknown>;
  model?: string;
  /** An API key or a token. In a page: an ephemeral token, never an API key. */
  key?: string;
  /** How sound is sent. Default: "int16"; float32 needs twice the bytes. */
  uplink?: "int16" | "float32";
  /** How often `connect` tries. Default: 5. */
  attempts?: number;
  /** The first wait between two attempts, in seconds. Default: 1. */
  retryBaseS?: number;
  /** How long one attempt waits for the connection. Default: 10. */
  connectTimeoutS?: number;
  /** How long one attempt waits for a slot. Default: 600. */
  queueTimeoutS?: number;
  /** Return to the conversation on a new connection after a loss. Default: false. */
  resumable?: boolean;
  /** After this time without an answer to sound, a resumable connection counts as lost. Default: 6. */
  silenceS?: number;
  /** Seconds before an attempt to return, counted from 0. Default: 0.25 to 4. */
  returnWaitS?: (attempt: number) => number;
  /** The connection is lost, and the session begins to return. `onReturn` or the end follows. */
  onLost?: () => void;
  /** The session has a new connection. */
  onReturn?: (back: Return) => void;
  onQueue?: (place: QueuePlace) => void;
  /** Gets refused inputs. Without it the iteration throws them; the session goes on. */
  onError?: (error: InputError) => void;
  /** Gets each event of the server. */
  onEvent?: (event: Event) => void;
  /** A constructor like that of browsers, where there is no global one. */
  WebSocket?: new (url: string, protocols: string[]) => unknown;
}

/**
 * One conversation over one WebSocket. `connect`, send sound, and iterate over the outputs.
 *
 * `connect` tries again while nothing is lost by it: until the conversation has begun. A
 * conversation that breaks later is lost, and the iteration throws: begin a new session. A
 * `resumable` one goes on over a new connection instead, if the server allows this: sound of the last
 * 10 s is sent again, and missed outputs come first. If another connection takes it, its `end` has
 * the reason `replaced`.
 */
export class DuplexSession implements AsyncIterable<Output> {
  /** `url` is `ws://HOST:PORT` or `wss://HOST`. */
  constructor(url: string, options?: SessionOptions);
  /** The event `session.created`; null before it. */
  readonly created: Event | null;
  /** How the session ended, if it ended in order. */
  readonly end: { reason: string } | null;
  /** Calls of `send` whose sound was dropped because the network takes nothing more. */
  readonly droppedSends: number;
  /** Wait for a slot and begin the conversation. Rejects with a DuplexError. */
  connect(options?: { signal?: AbortSignal }): Promise<this>;
  /**
   * Send mono sound of 8 to 192 kHz (default: 16 kHz), and pictures, which are files. Returns
   * false if nothing was sent. In B the outputs and errors about this sound have its `inputId`.
   */
  send(
    sound: Int16Array | Float32Array,
    options?: { rate?: number; pictures?: Uint8Array[]; inputId?: string },
  ): boolean;
  /** Stop the model: the next sound makes it listen, and the rest of its turn is dropped. */
  interrupt(): void;
  /** Drop sound instead of sending it. */
  pause(): void;
  resume(): void;
  /** End the session, also while there is no connection, or leave the queue. */
  close(reason?: string): Promise<void>;
  [Symbol.asyncIterator](): AsyncIterator<Output>;
}

export interface ErrorDetails {
  code?: string;
  closeCode?: number;
  inputId?: string;
}

/** A session failed. `code` is the server's word for the reason, or empty. */
export class DuplexError extends Error {
  constructor(detail: string, details?: ErrorDetails);
  /** The message without the code. */
  readonly detail: string;
  readonly code: string;
  readonly closeCode: number | null;
  /** The name of the refused input, if `send` gave it one. */
  readonly inputId: string | null;
  /** Whether a new session may succeed with the same arguments. */
  readonly canRetry: boolean;
}
/** The server refuses settings, or one input; in the second case the session goes on. */
export class InputError extends DuplexError {}
/** The server refuses this client: its credential, its mode, a message, or slow reading. */
export class RefusedError extends DuplexError {}
/** The server has no room now. */
export class BusyError extends DuplexError {}
/** The server or the model failed or shuts down. The conversation is lost. */
export class ServerError extends DuplexError {}
/**
 * There is no connection to the server, or it broke. A refused upgrade looks the same: WebSockets do
 * not show its status.
 */
export class ConnectionLostError extends DuplexError {}

/** Return how long to wait before attempt `attempt + 1`, or null if it is of no use. */
export function retryWaitS(error: DuplexError, attempt: number, baseS?: number): number | null;
