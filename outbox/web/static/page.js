"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const say = (text) => { const at = byId("status"); if (at && at.textContent !== text) at.textContent = text; };

  // Times are local, and in UTC on hover; on a narrow screen each cell names its column.
  const label = (root) => {
    for (const at of root.querySelectorAll("time")) {
      const [date, fraction] = [new Date(at.dateTime), at.title.match(/\.\d+/)?.[0] ?? ""];
      at.textContent = date.toLocaleString("sv-SE") + fraction;
    }
    for (const table of root.querySelectorAll("table")) {
      const names = [...table.querySelectorAll("thead th")].map((it) => it.textContent.trim());
      for (const row of table.tBodies[0]?.rows ?? []) {
        [...row.cells].forEach((cell, at) => { if (names[at]) cell.dataset.label = names[at]; });
      }
    }
  };

  // Replaces the content, and keeps the focus.
  const replace = (live, found) => {
    label(found);
    if (live.innerHTML === found.innerHTML) return;
    const focused = live.contains(document.activeElement) ? document.activeElement.id : "";
    live.replaceChildren(...found.childNodes);
    if (focused) byId(focused)?.focus({ preventScroll: true });
  };

  const follow = (live) => {
    let timer = setTimeout(() => read(), 3000);
    const read = async () => {
      clearTimeout(timer);
      if (document.hidden) return;
      const started = performance.now();
      try {
        const answer = await fetch(location.href, { headers: { accept: "text/html" }, signal: AbortSignal.timeout(60000) });
        // The login has ended: the server redirects to the form.
        if (answer.redirected) { location.reload(); return; }
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        const found = page.getElementById("live");
        if (!found) say("Not up to date: " + (page.querySelector(".problem")?.textContent.trim() ?? answer.status));
        // A row that newer ones push off the page would no longer be checked.
        else if (live.querySelector(":checked")) say("Not up to date: rows are checked");
        // Don't replace the content while the viewer has selected text in it.
        else if (getSelection().isCollapsed || !live.contains(getSelection().anchorNode)) {
          replace(live, found);
          say("Live");
        }
      } catch {
        say("Not up to date: the connection is lost. Connecting again…");
      }
      clearTimeout(timer);
      // A page that is slow to read is read less often.
      timer = setTimeout(read, Math.max(3000, 20 * (performance.now() - started)));
    };
    document.addEventListener("visibilitychange", read);
    say("Live");
  };

  document.addEventListener("DOMContentLoaded", () => {
    label(document);
    const token = byId("token");
    // Browsers don't send the part after # to the server, so no log contains it.
    if (token && location.hash.length > 1) {
      token.value = decodeURIComponent(location.hash.slice(1));
      history.replaceState(null, "", location.pathname);
    }
    for (const button of document.querySelectorAll("[data-copy]")) {
      button.addEventListener("click", async () => {
        await navigator.clipboard.writeText(byId(button.dataset.copy).textContent);
        button.textContent = "Copied";
      });
    }
    const live = byId("live");
    if (live) follow(live);
  });
})();
