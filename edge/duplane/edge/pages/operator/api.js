/** Requests to the edge, with the operator's key. */

const KEY = "duplane.operator-key";

/** A request that the edge has refused. */
export class RefusedError extends Error {
  /** @param {number} status @param {string} detail @param {number} retryAfterS */
  constructor(status, detail, retryAfterS) {
    super(detail);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }

  /** Whether another key may be accepted. */
  get needsKey() {
    return this.status === 401 || this.status === 403;
  }
}

/** Sends requests. The key is never part of a URL, and is forgotten with the tab. */
export class Api {
  /** @param {Storage} storage @param {typeof fetch} fetchFunction */
  constructor(storage, fetchFunction) {
    this._storage = storage;
    this._fetch = fetchFunction;
  }

  /** @param {string} key */
  useKey(key) {
    this._storage.setItem(KEY, key);
  }

  /** Whether requests have a key. */
  get hasKey() {
    return this._storage.getItem(KEY) !== null;
  }

  /**
   * @param {string} path
   * @param {{method?: string, body?: unknown, signal?: AbortSignal}} [options]
   * @returns {Promise<Response>}
   */
  async ask(path, { method = "GET", body, signal } = {}) {
    /** @type {Record<string, string>} */
    const headers = {};
    const key = this._storage.getItem(KEY);
    if (key) headers["Authorization"] = `Bearer ${key}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const answer = await this._fetch(path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      credentials: "omit",
      cache: "no-store",
    });
    if (answer.ok) return answer;
    const retryAfterS = Number(answer.headers.get("Retry-After")) || 0;
    throw new RefusedError(answer.status, await detailOf(answer), retryAfterS);
  }

  /** @param {string} path @returns {Promise<any>} */
  async json(path) {
    return (await this.ask(path)).json();
  }
}

/** @param {Response} answer */
async function detailOf(answer) {
  try {
    const detail = (await answer.json()).detail;
    return typeof detail === "string" ? detail : `status ${answer.status}`;
  } catch {
    return `status ${answer.status}`;
  }
}
