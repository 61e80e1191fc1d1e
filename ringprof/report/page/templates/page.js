"use strict";
// Click a heading to sort by its column, again to turn the order round. Figures sort by value, dashes last.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement;
    const table = head.closest("table");
    const column = [...head.parentElement.children].indexOf(head);
    const numeric = head.classList.contains("number");
    const before = head.getAttribute("aria-sort");
    const falling = before === null ? numeric : before === "ascending";
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", falling ? "descending" : "ascending");
    const key = (row) => row.children[column].dataset.key;
    const value = (row) => (key(row) === "-inf" ? -Infinity : Number(key(row)));
    const order = numeric
      ? (a, b) => (value(a) === value(b) ? 0 : value(a) - value(b))
      : (a, b) => key(a).localeCompare(key(b), undefined, { numeric: true });
    const rows = [...table.tBodies[0].rows].sort((a, b) => (falling ? order(b, a) : order(a, b)));
    table.tBodies[0].append(...rows);
  });
}
// Save a table as it is sorted: cells as they are shown, none of which a spreadsheet would run as a formula.
for (const button of document.querySelectorAll(".below button")) {
  button.addEventListener("click", () => {
    const scroll = button.closest(".below").previousElementSibling;
    const cell = (one) => {
      const text = one.innerText.trim();
      const plain = one.classList.contains("number") ? text.replace(/,/g, "") : text.replace(/^[=+\-@]/, "'$&");
      return /[",\n]/.test(plain) ? '"' + plain.replace(/"/g, '""') + '"' : plain;
    };
    const lines = [...scroll.querySelectorAll("tr")].map((row) => [...row.cells].map(cell).join(","));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([lines.join("\n") + "\n"], { type: "text/csv" }));
    link.download = (scroll.closest("section").id || "table") + ".csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
}
