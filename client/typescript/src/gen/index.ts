export * from "./moorage/v1/inspector_pb.js";
export * from "./moorage/v1/operator_pb.js";
export * from "./moorage/v1/scheduler_pb.js";
