// A client of duplane's realtime protocols: `DuplexSession` speaks dialects A and B.

export {
  BusyError,
  ConnectionLostError,
  DuplexError,
  InputError,
  RefusedError,
  ServerError,
  retryWaitS,
} from "./errors.js";
export { INPUT_RATE, OUTPUT_RATE } from "./events.js";
export { DuplexSession } from "./session.js";
