// Errors as types, and the rules for trying again.

const MAX_WAIT_S = 30; // the longest wait that a client chooses by itself

export class DuplexError extends Error {
  constructor(detail, { code = "", closeCode = null, inputId = null } = {}) {
    super(code ? `${code}: ${detail}` : detail);
    this.name = this.constructor.name;
    this.detail = detail;
    this.code = code;
    this.closeCode = closeCode;
    this.inputId = inputId;
  }

  get canRetry() {
    return true;
  }
}

export class InputError extends DuplexError {
  get canRetry() {
    return false;
  }
}

export class RefusedError extends DuplexError {
  get canRetry() {
    return false;
  }
}

export class BusyError extends DuplexError {}
export class ServerError extends DuplexError {}
export class ConnectionLostError extends DuplexError {}

/** Return the error for a close code of a WebSocket. */
export function errorOfClose(closeCode, message, code = "") {
  const kinds = {
    1001: ServerError,
    1003: RefusedError,
    1007: RefusedError,
    1008: RefusedError,
    1009: RefusedError,
    1011: ServerError,
    1013: BusyError,
  };
  const Kind = kinds[closeCode] ?? ConnectionLostError;
  return new Kind(message || `the connection is closed (${closeCode})`, { code, closeCode });
}

// The wait doubles with each attempt, up to 30 s, and half of it is random, so that many clients
// do not return together. WebSockets show neither the status of a refused upgrade nor its header
// `Retry-After`, so such a refusal counts as a lost connection.
export function retryWaitS(error, attempt, baseS = 1) {
  if (!error.canRetry) return null;
  const longest = Math.min(MAX_WAIT_S, baseS * 2 ** Math.min(attempt, 10));
  return longest * (0.5 + Math.random() / 2);
}
