export * from "./client.js";
export * from "./connect.js";
export * from "./error.js";
export * from "./gen/index.js";
