/** What operators can switch at this edge, and the durations from which waits are estimated. */

import { RefusedError } from "./api.js";
import { byId, confirmed, setText } from "./elements.js";
import { duration } from "./model.js";
import { Table } from "./tables.js";

/** @typedef {{app_id: string, name: string, enabled: boolean}} App */

/** The settings are loaded when their section is opened, and after each switch. */
export class Settings {
  /** @param {import("./api.js").Api} api */
  constructor(api) {
    this._api = api;
    this._status = byId("settings-status", HTMLElement);
    /** @type {Table<App>} */
    this._apps = new Table("apps", ["Kind of session", "New sessions", ""]);
    /** @type {Table<null>} */
    this._estimates = new Table("estimates", ["Kind of session", "Expected to last", "Mean of ended sessions", "Ended sessions"]);
    const section = byId("settings", HTMLDetailsElement);
    section.addEventListener("toggle", () => {
      if (section.open) void this._load();
    });
  }

  async _load() {
    try {
      const [{ apps }, estimates] = await Promise.all([
        this._api.json("/api/admin/apps"),
        this._api.json("/api/config/eta"),
      ]);
      this._apps.render(apps.map(appRow), "", false, (app) => void this._switch(app));
      this._estimates.render(estimateRows(estimates), "", false, () => {});
    } catch (error) {
      setText(this._status, `The settings were not loaded: ${messageOf(error)}`);
    }
  }

  /** @param {App} app */
  async _switch(app) {
    const question = app.enabled
      ? {
          title: `Refuse new sessions of ${app.name}?`,
          text: "This edge refuses them until they are allowed again or it restarts. Running sessions continue.",
          yes: "Refuse them",
        }
      : { title: `Allow new sessions of ${app.name}?`, text: "This edge accepts them again.", yes: "Allow them" };
    if (!(await confirmed(question))) return;
    try {
      const body = { enabled: !app.enabled };
      await this._api.ask(`/api/admin/apps/${encodeURIComponent(app.app_id)}`, { method: "PUT", body });
      setText(this._status, `New sessions of ${app.name} are ${app.enabled ? "refused" : "allowed"}.`);
    } catch (error) {
      setText(this._status, messageOf(error));
    }
    await this._load();
  }
}

/** @param {App} app */
function appRow(app) {
  const verb = app.enabled ? "Refuse" : "Allow";
  return {
    key: `${app.app_id} ${app.enabled}`, // another button when it is switched
    cells: [app.name, app.enabled ? "allowed" : "refused"],
    action: { text: verb, label: `${verb} new sessions of ${app.name}` },
    row: app,
  };
}

/**
 * Return a row for each kind of session in the answer of /api/config/eta.
 * @param {any} estimates
 */
export function estimateRows(estimates) {
  return Object.keys(estimates.config)
    .map((name) => /^eta_(\w+)_s$/.exec(name)?.[1])
    .filter((kind) => kind !== undefined)
    .map((kind) => {
      const mean = estimates[`ema_${kind}_s`];
      return {
        key: kind,
        cells: [
          kind,
          duration(estimates.config[`eta_${kind}_s`]),
          mean === null ? "none has ended" : duration(mean),
          String(estimates[`ema_${kind}_samples`]),
        ],
        action: null,
        row: null,
      };
    });
}

/** @param {unknown} error */
function messageOf(error) {
  if (error instanceof RefusedError) return `The edge refuses: ${error.message}.`;
  return "The edge does not answer.";
}
