-- A comma-separated vector as a list.
local function numbers(vector)
  local list = {}
  for value in string.gmatch(vector or '', '[^,]+') do list[#list + 1] = tonumber(value) end
  return list
end
